"""Gives memory that large messages needed back to the system."""

from __future__ import annotations

import ctypes
import mmap

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)


def return_large_blocks() -> None:
    """Have blocks of a megabyte or more go back to the system as soon as they are freed.

    Without this, glibc raises its threshold to the largest block that was freed so far (32 MB
    at most), and keeps each later block below that, one heap for each thread.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None:
        # Another C library has no such habit, and no such function.
        return
    for name in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        mallopt(name, _LARGE_BYTES)
    mallopt(_ARENA_MAX, 2)


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def return_freed() -> None:
    """Give what is freed back to the system, small blocks too. Takes milliseconds."""
    trim = getattr(_LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
