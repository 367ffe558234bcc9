"""The `trimaran` command and everything that starts, watches and ends a server's processes.

In come flags, a model repository and signals; out go processes, exit codes and log lines. `cli`
holds the commands, `flags` their flags, `resolution` turns both into a checked `ServeConfig`
(`config.py`) with the help of `placement`, and `supervisor` runs that configuration over
`starters`. The supervisor imports no torch and no MPI.
"""
