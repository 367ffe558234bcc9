"""Benchmarks of a server: load, measurements of each token, summaries.

Owns workloads, the two protocols, load processes and the server under test. In: a server's
address, lengths, rates and concurrencies. Out: throughput, latencies and token times as tables,
JSON and CSV. `benchmark.py` is the plain benchmark of Triton's TensorRT-LLM backend.
"""
