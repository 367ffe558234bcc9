"""Bytes between processes: mapped memory, rings in it, and sockets.

In come bytes or a size; out go mapped segments, futex waits, frames and connected sockets. The
kernel frees all resources with the last process that holds them, so a killed process leaves
nothing behind. `messages`, `control` and `collectives` define the meaning of the bytes.
"""
