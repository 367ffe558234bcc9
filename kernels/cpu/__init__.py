"""The operators on a CPU, by C++ kernels compiled once for each machine.

Owns `csrc/`, the binding, and whole decoder layers as one operator. In: contiguous tensors of
float32 or bfloat16. Out: the results of `kernels/reference.py`; a row's bits do not depend on
its batch. AVX2, AVX-512 and AMX variants are chosen at run time.
"""
