"""Runs scheduled steps on this rank's device.

Owns `ModelRunner`, CUDA graphs, device inputs, the device cache and the ends of a stage's step.
In: a `SchedulerOutput`.
Out: sampled ids and logits as copies to the host, or hidden states to the next stage.
No host synchronisation happens inside a step.
"""
