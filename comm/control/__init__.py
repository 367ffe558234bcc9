"""Step decisions from rank 0 to all ranks of a group, and step results back to rank 0.

In come encoded decisions and results (bytes); out come the same bytes, each once and in order,
or `PeerLostError` when a rank misses its deadline. Within a host they travel through rings in
shared memory, between hosts over MPI (decisions) and TCP (results, wake-ups).
"""
