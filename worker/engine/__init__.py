"""The engine of one rank: the loop around scheduler, adapters and model runner.

In come front ends' messages (`Engine.submit`, `cancel`) on rank 0 and decisions of rank 0
(`Engine.follow`) on all others. Out go messages for front ends (`Engine.step`) and decisions
for the other ranks. `Engine.load` makes an engine that is ready to step; `interfaces.py`
declares the parts that it steps.
"""
