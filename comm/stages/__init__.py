"""Hidden states between pipeline stages, and a rank's links outside its tensor group.

In come hidden states [T, D] of a step; they come out at the next stage, in order.
`stage_links.py` is the interface of both ends; shared memory, peer memory of GPUs, gloo and
NCCL implement it. `pipeline.py` chooses the transport and holds all links of one rank.
"""
