"""Mixtures of experts for few tokens, whose experts are streamed without a sort.

Owns the kernels of single experts, and those of whole mixtures with their norm, router and
shared experts. In: rows of few tokens, matrices of experts, and choices or a router. Out:
weighted sums, or their parts for the next norm. `kernels.experts` chooses among these and
grouped products.
"""
