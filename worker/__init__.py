"""One rank of a worker group: the engine and everything that runs a model.

Owns the step loop, the scheduler, the KV cache, the models and their sampling.
In: requests and cancellations from front ends; decisions of rank 0 on the other ranks.
Out: new token ids, log-probabilities, logits and statistics, one message a step.
Imports `kernels` and `comm` only; `rank.py` is the process, `engine/engine.py` the loop.
"""
