"""`trimaran slurm`: batch jobs that serve: render, submit, wait for, drain and stop them.

In come the flags of a job and those of the server in it; out go a batch script from
`templates/`, Slurm's own commands, and the endpoints that each server has written to its ready
file. Starting ranks inside a running allocation is the launcher's task, not this package's.
"""
