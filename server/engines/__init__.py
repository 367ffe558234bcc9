"""Engines as the front end sees them: connections, routing and replay.

Owns which group runs which request, and what happens when a group dies.
In: submissions of token-level models; step messages of rank 0 of each group.
Out: token chunks to waiting requests; submissions and cancellations to groups.
`client.py` listens, `model_engines.py` serves one generation of a model.
"""
