"""Attention over the paged KV cache.

Owns `AttentionBackend`, the interface of attention kernels, and `AttentionMetadata`.
In: a step's queries, block tables and lengths.
Out: attention outputs, and keys and values written to their slots.
The kernels are in `kernels/`.
"""
