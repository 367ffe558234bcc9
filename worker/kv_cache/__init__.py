"""The paged KV cache: ownership and memory of blocks, and the policy of their reuse.

Owns block pools, prefix reuse, eviction, host offload and reservations.
In: sequences that grow, fork, pause and end; content hashes; memory sizes.
Out: block tables, block copies and transfers that a step carries out.
`manager.py` is the one entry of the scheduler.
"""
