"""The process that spawns worker groups through MPI in multi-model serving.

In come spawn and forget commands of the supervisor; out go ranks by MPI_Comm_spawn, and one
event a group. The process is an MPI singleton whose loop sleeps in the kernel and whose side
threads call Spawn; it imports no torch and loads no models. `launcher.placement` decides the
placement of groups, and the supervisor watches the spawned ranks.
"""
