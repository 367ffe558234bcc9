"""Guided decoding: grammars that say which token ids may come next.

Owns the compilation of JSON schemas, regular expressions, grammars and choices, in processes
of their own.
In: a client's guide and the tokenizer of the model.
Out: a `Guide` per sequence: a bit mask of allowed ids, and its advance by one id.
A guide that the compiler would partly ignore, or that would end its process, is refused.
"""
