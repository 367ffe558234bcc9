"""Placement of ranks: hosts, GPUs and slots, and the ways of starting ranks here.

In come the groups of all models, the named or allocated hosts and the running groups; out go a
host and a device for every rank, or the reason why there is no room. `placement.py` is the
algorithm, `group_placement.py` applies it to worker groups. `preflight.py` checks the machine
itself: ports, shared memory, GPUs, host names.
"""
