"""Ports for the servers of benchmarks and tests, several of which may run on one machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MIN_PORTS = 1000
_USUAL = range(20_000, 32_000)

_given: set[int] = set()
"""Ports given out by this process. A process could lock its own locked ports again."""


def free_ports(count: int) -> list[int]:
    """Ports without a listener, which no other caller of this function is about to use.

    A server binds its ports seconds after they were chosen. A port is therefore given only once
    to all processes of this user that call this function, for as long as the caller's process
    lives. Ports of the kernel's ephemeral range are excluded.

    Raises:
        OSError: too few ports are free.
    """
    free: list[int] = []
    candidates = _candidates()
    for port in random.sample(candidates, len(candidates)):
        if len(free) == count:
            break
        if port not in _given and _is_unused(port) and _lock(port):
            _given.add(port)
            free.append(port)
    if len(free) < count:
        raise OSError(errno.EADDRINUSE, f"{count} ports asked for, only {len(free)} are free")
    return free


@functools.cache
def _candidates() -> range:
    """Unprivileged ports outside the ephemeral range, or the usual range if these are few."""
    try:
        first, last = map(int, _RANGE_FILE.read_text(encoding="ascii").split())
    except OSError:
        return _USUAL
    most = max(range(10_000, first), range(last + 1, 65_536), key=len)
    return most if len(most) >= _MIN_PORTS else _USUAL


def _is_unused(port: int) -> bool:
    with socket.socket() as sock, contextlib.suppress(OSError):
        sock.bind(("0.0.0.0", port))
        return True
    return False


def _lock(port: int) -> bool:
    """Lock a byte of a file for each port: the kernel unlocks it when this process ends."""
    try:
        fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _lock_file() -> int:
    """Open until this process ends: closing any descriptor of the file would unlock all its
    ports.
    """
    path = Path(tempfile.gettempdir(), f"trimaran-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
