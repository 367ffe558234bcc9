"""Memory that clients share with the server.

Owns the regions that clients register, by name, and access to their bytes. In: keys of POSIX
shared memory, handles of CUDA memory, and slices of regions. Out: copies of input tensors,
and output tensors written in place. No region is mapped: a client that shortens its file gets
an error and ends no process. The CUDA driver is called through ctypes, without torch.
"""
