"""Benchmarks of single operators.

Owns the cases of `trimaran bench kernels` and how an operator is timed.
In: shapes, row counts and a device.
Out: time, share of the operator's own roofline, and other libraries beside it.
A case checks its result before it is timed.
"""
