"""Bytes between processes: mapped memory, rings in it, and sockets.

In come bytes or a size; out go mapped segments, futex waits, frames and connected sockets. The
kernel frees all of it with the last process that holds it, so a killed process leaves nothing
behind. What the bytes mean is known in `messages`, `control` and `collectives`.
"""
