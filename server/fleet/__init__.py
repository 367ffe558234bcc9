"""Several front ends on the same ports.

Owns the link between the first front end and its followers, and what they share. In: decisions
of the first front end; questions and counts of the followers. Out: the same models and settings
at every front end; sums of all counts at the first. `administration.py` defines the decisions
of the first front end; a single front end has `NoPeers`.
"""
