"""Benchmarks of an engine without a front end.

Owns `trimaran bench throughput` and `latency`, and other engines on the same load. In: a
model's shape or folder, and loads such as 128/128x4096. Out: output tokens a second beside the
machine's limit. A peer runs in a separate process, so that its memory is freed.
"""
