"""Requests and their sequences: what a client asked for, and how far the engine has come.

A request comes in checked, from the engine's input processor. The scheduler moves its sequences
from waiting to running to finished, and the output processor reads them. A sequence holds its
token ids, its KV blocks, its guide and its row; no other module keeps state of a sequence.
"""
