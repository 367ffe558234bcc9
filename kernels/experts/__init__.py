"""Mixtures of experts on a GPU: which kernels multiply by floats, FP8 and integers.

In come tokens, their choices of experts, and stacks of matrices as loaded or stored; out go the
weighted sums. The kernels lie in `cuda` and `triton`, the definitions in `reference`,
`byte_reference` and `integer_reference`.
"""
