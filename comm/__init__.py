"""Communication between processes: MPI, collectives, control plane, messages, transports.

In come tensors, step decisions and messages of one process; its peers get them out. The lowest
package: imports no other package. `mpi.py` alone initialises MPI and must be imported before
anything that can fail. The package also holds what all packages need: the error tree
(`errors.py`), log set-up, deadlines and watchdog, parallel topology, and `files`.
"""
