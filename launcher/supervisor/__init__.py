"""The supervisor: runs every process of one server, restarts dead ones, drains and ends.

In come a `ServeConfig`, signals, and the states and requests of children over their control
connections; out go configurations and commands to children, group states to the front ends,
restarts within a budget, and the exit code. `runtime.py` opens the supervisor's resources,
`supervisor.py` runs it, `group.py` follows one group through its incarnations.
"""
