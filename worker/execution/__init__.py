"""Runs a decided step on this rank's device.

Owns `ModelRunner`, CUDA graphs, device inputs, the device cache and the ends of a stage.
In: a `SchedulerOutput`.
Out: sampled ids and logits on their way to the host, or hidden states to the next stage.
No host synchronisation happens inside a step.
"""
