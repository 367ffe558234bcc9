"""Operators of a model, each in plain torch and in faster versions, and the choice among them.

Owns CPU (C++), Triton and CUDA kernels, and the dispatch by device, dtype and shape. In:
tensors in documented shapes. Out: results within dtype tolerance of `reference.py`;
`operators.py` declares each operator. On top are `dispatch`, `gpu`, `products`, `experts` and
`decode_attention`, which choose kernels.
"""
