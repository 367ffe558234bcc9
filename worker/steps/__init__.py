"""The data of one engine step, free of any policy.

Owns `SchedulerOutput`, the decision sent to every rank, and `SampledTokens`, its result.
In: arrays that the scheduler fills, and times that the loop measures.
Out: encoded decisions, host buffers with their one copy to the device, step times.
Every other room may import this one.
"""
