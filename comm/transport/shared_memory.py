"""Memory that several processes of one host map, and futex waits on its words."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import time
from collections.abc import Callable

from trimaran.comm.errors import ConfigError

CACHE_LINE_BYTES = 64
WORDS_A_LINE = CACHE_LINE_BYTES // 8

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_WAITERS = 0x7FFFFFFF
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedSegment:
    """A mapped block of zeroed memory without a name in any file system.

    Its creator hands ``handle`` to the other processes, which open it through ``/proc``. The
    kernel frees the block when the last process that maps it ends, even by a crash.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        self.num_bytes = num_bytes
        self.map = mmap.mmap(fd, num_bytes)
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """New memory of this process, zeroed."""
        fd = os.memfd_create("trimaran", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return cls(fd, num_bytes)

    @classmethod
    def attach(cls, handle: tuple[int, int, int]) -> SharedSegment:
        """Map a block of another process of this host.

        Raises:
            ConfigError: the other process's memory may not be opened.
        """
        pid, fd, num_bytes = handle
        path = f"/proc/{pid}/fd/{fd}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"cannot open the shared memory of rank process {pid} ({path}): {error}. "
                "The ranks of a host must run as one user with /proc mounted."
            ) from error
        return cls(own, num_bytes)

    @property
    def handle(self) -> tuple[int, int, int]:
        """The argument of `attach`: process id, descriptor and size."""
        return (os.getpid(), self._fd, self.num_bytes)

    def words(self) -> memoryview:
        """The whole segment as unsigned 64-bit words."""
        return memoryview(self.map).cast("Q")

    def close_descriptor(self) -> None:
        """Free the descriptor once all processes have attached; the mapping stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Futex:
    """Sleep until a 32-bit word of shared memory changes. Calls release the GIL."""

    def __init__(self, address: int) -> None:
        machine = platform.machine()
        if machine not in _FUTEX_NUMBERS:
            raise ConfigError(
                f"no futex call is known for {machine}; known: {', '.join(_FUTEX_NUMBERS)}"
            )
        self._number = ctypes.c_long(_FUTEX_NUMBERS[machine])
        self._word = ctypes.c_void_p(address)

    def wait(self, expected: int, timeout_s: float) -> None:
        """Return at a wake-up, when the word is not ``expected``, or at the time limit."""
        fraction, seconds = math.modf(max(timeout_s, 0.0))
        limit = _Timespec(int(seconds), int(fraction * 1e9))
        rc = _libc.syscall(
            self._number,
            self._word,
            ctypes.c_int(_FUTEX_WAIT),
            ctypes.c_uint32(expected & 0xFFFFFFFF),
            ctypes.byref(limit),
        )
        if rc < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(ctypes.get_errno(), "futex wait failed")

    def wake(self) -> None:
        """Wake every waiter."""
        _libc.syscall(
            self._number, self._word, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_ALL_WAITERS)
        )


def _make_fence() -> Callable[[], object]:
    """A call after which earlier writes of this process are visible before later ones.

    x86-64 guarantees that order. On other processors a post and a take of a private semaphore
    act as the barrier: their release and acquire on one word order all accesses around them.
    """
    if platform.machine() == "x86_64":
        return lambda: None
    semaphore = ctypes.create_string_buffer(64)
    _libc.sem_init(semaphore, 0, 0)
    post, take = _libc.sem_post, _libc.sem_trywait

    def fence() -> None:
        post(semaphore)
        take(semaphore)

    return fence


fence = _make_fence()


def spin_until(is_done: Callable[[], bool], spin_s: float) -> bool:
    """Poll while yielding the core, for at most ``spin_s``."""
    if is_done():
        return True
    end = time.monotonic() + spin_s
    while time.monotonic() < end:
        os.sched_yield()
        if is_done():
            return True
    return False
