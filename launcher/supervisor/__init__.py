"""The supervisor: runs every process of one server, restarts dead processes, drains and ends.

In come a `ServeConfig`, signals, and the states and requests of children over their control
connections; out go configurations and commands to children, group states to the front ends,
restarts within a budget, and the exit code. `runtime.py` opens the supervisor's resources,
`supervisor.py` runs the server, `group.py` manages the incarnations of one group.
"""
