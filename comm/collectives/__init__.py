"""Collectives on tensors among the ranks of one tensor group.

In come a `World` and a device; out goes a `TensorParallelGroup`: all-reduce, all-gather,
broadcast, all-to-all, barrier. `connect.py` chooses the transport: shared memory for CPU ranks
of one host, gloo across hosts, NCCL on GPUs. `tensor_group.py` is the interface; memory that
GPUs map from each other is in `torch_groups.py`.
"""
