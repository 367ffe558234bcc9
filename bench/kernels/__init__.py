"""Benchmarks of single operators.

Owns the cases of `trimaran bench kernels` and the timing of an operator. In: shapes, row counts
and a device. Out: time, share of the operator's own roofline, and other libraries' times. A
case checks its result before it is timed.
"""
