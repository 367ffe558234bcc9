"""Benchmarks that users run: offline throughput and latency, against the machine's limit."""
