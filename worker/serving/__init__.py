"""A rank as a process: front ends, supervisor and other ranks.

Owns the connections to front ends, the loop that waits for work, and process settings.
In: messages of front ends and the supervisor.
Out: step messages, separate large payloads, heartbeats.
The engine itself uses no sockets.
"""
