"""Guided decoding: grammars that say which token ids may come next.

Owns the compilation of JSON schemas, expressions, grammars and choices, in processes apart.
In: a client's guide and the tokenizer of the model.
Out: a `Guide` per sequence: a bit mask of allowed ids, and its advance by one id.
What a compiler would ignore or not survive is refused.
"""
