"""Triton attention over the paged cache: decode, prefill, and latent vectors.

Owns the kernels and the split of a step's keys over programs. In: queries, block tables,
lengths, and the cache. Out: attention outputs of every query token. `scores.py` has the online
softmax of all attention kernels.
"""
