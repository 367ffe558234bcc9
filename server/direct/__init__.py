"""Owns the short way of plain text requests.

In: one short prompt with numbers and flags, for one sequence. Out: the answer's text and
counts, or the responses of its stream, made without the steps' tensors and generators. A
request that is not plain, or is wrong, is refused here without an error: the models take such a
request and word its error.
"""
