"""The five native models and graphs of them.

Owns tokenization, sampling inputs, the token-level model, detokenization and ensembles.
In: checked requests.
Out: responses; token-level requests to `engines/`.
`factory.py` builds a model from its configuration.
"""
