"""Owns the short way of plain text requests.

In: one short prompt with numbers and flags, for one sequence and one answer. Out: the answer's
text and counts, made without tensors, generators or streams. A request that is not plain, or is
wrong, is refused here without an error: the models take such a request and word its error.
"""
