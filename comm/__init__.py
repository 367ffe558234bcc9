"""Communication between processes: MPI, collectives, control plane, messages, transports.

In come tensors, step decisions and messages of one process; the same come out at its peers.
The lowest package: it imports nothing of the others. `mpi.py` alone initialises MPI and must be
imported before anything that can fail. Also here, as all packages need them: the error tree
(`errors.py`), log set-up, deadlines and watchdog, parallel topology, and `files`.
"""
