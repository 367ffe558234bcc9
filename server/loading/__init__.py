"""Loading and unloading of models while the server runs.

Owns the set of loaded models, their worker groups and their replacement. In: the repository,
load requests, and the supervisor's answers. Out: registered models; requests for worker groups
to the supervisor; state for a successor. `control.py` is the entry point; docs/loading.md
describes a load.
"""
