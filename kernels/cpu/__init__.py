"""The operators on a CPU, by C++ kernels compiled once a machine.

Owns `csrc/`, the binding, and whole decoder layers as one operator.
In: contiguous tensors of float32 or bfloat16.
Out: what `kernels/reference.py` defines, equal for a row whatever its batch.
AVX2, AVX-512 and AMX variants are chosen at run time.
"""
