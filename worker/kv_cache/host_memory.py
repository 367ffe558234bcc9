"""Host memory for KV blocks: mapped in huge pages, touched and page-locked by threads."""

from __future__ import annotations

import errno
import math
import mmap
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.host_limits import free_memory_bytes, usable_cores

_SETTING = "kv_cache_host_memory_bytes"
_CHUNK_BYTES = 1 << 30
"""Bytes locked in one call: a single call for 512 GiB fails even with enough free memory."""

_MAX_THREADS = 8
"""More threads would wait for memory bandwidth and for the driver's lock."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for all CUDA contexts of this process."""


class PageLocks(Protocol):
    """Page-locks memory for a device's copies."""

    def lock(self, address: int, num_bytes: int) -> int:
        """Lock a range of whole pages. Returns 0 or an error number."""

    def unlock(self, address: int) -> None:
        """Unlock the range that begins at ``address``."""


class CudaLocks:
    """Page locks of the CUDA driver. Any thread may call the methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def lock(self, address: int, num_bytes: int) -> int:
        """See `PageLocks`."""
        # A new thread's current device is the first GPU, where it would open a context.
        with torch.cuda.device(self._device):
            return int(self._cudart.cudaHostRegister(address, num_bytes, _PORTABLE))

    def unlock(self, address: int) -> None:
        """See `PageLocks`."""
        with torch.cuda.device(self._device):
            self._cudart.cudaHostUnregister(address)


class HostMemory:
    """Rows of bytes in host memory; each row is copied as a whole.

    With ``locks`` all pages are touched and locked, in ranges of whole rows and pages, because
    no copy may cross from one locked range to another. Several threads touch pages, because the
    kernel serves a single thread at about 2 GiB a second. The threads have the CPU affinity of
    their creator, so that pages come from its NUMA node. Without ``locks``, pages are allocated
    when written. Memory that is dropped without `close` stays locked; unlocked memory lives as
    long as a view of it.
    """

    def __init__(
        self,
        num_rows: int,
        row_bytes: int,
        locks: PageLocks | None = None,
        *,
        num_threads: int = _MAX_THREADS,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._shape = (num_rows, row_bytes)
        self._num_threads = min(num_threads, usable_cores())
        self._locks = locks
        self._locked: list[int] = []
        self._error = 0
        size = _round_up(num_rows * row_bytes, mmap.PAGESIZE)
        if locks is not None:
            _check_room(size)
        self._mapping = _map(size)
        if locks is None:
            return
        page_rows = mmap.PAGESIZE // math.gcd(row_bytes, mmap.PAGESIZE)
        step = _round_up(chunk_bytes, page_rows * row_bytes)
        self._lock([(first, min(first + step, size)) for first in range(0, size, step)])

    def rows(self, dtype: torch.dtype) -> Tensor:
        """All rows, [rows, elements], initially zeros."""
        num_rows, row_bytes = self._shape
        flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_rows * row_bytes)
        return flat.view(dtype).view(num_rows, -1)

    def close(self) -> None:
        """Unlock all pages. No copy may be in flight."""
        if self._locks is not None and self._locked:
            with ThreadPoolExecutor(self._num_threads) as threads:
                list(threads.map(self._locks.unlock, self._locked))
        self._locked = []

    def _lock(self, chunks: list[tuple[int, int]]) -> None:
        with ThreadPoolExecutor(min(self._num_threads, len(chunks))) as threads:
            list(threads.map(self._lock_chunk, chunks))
        if self._error:
            self.close()
            raise ConfigError(_refusal(len(self._mapping), self._error))

    def _lock_chunk(self, chunk: tuple[int, int]) -> None:
        assert self._locks is not None
        if self._error:
            return
        first, end = chunk
        memory = np.frombuffer(self._mapping, np.uint8)
        # NumPy writes without Python's lock.
        memory[first : end : mmap.PAGESIZE] = 0
        address = memory.ctypes.data + first
        error = self._locks.lock(address, end - first)
        if error:
            self._error = error
        else:
            self._locked.append(address)


def _map(size: int) -> mmap.mmap:
    """A private, zeroed mapping of ``size`` bytes."""
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{_SETTING}: {size} bytes of the host's memory cannot be mapped ({error}). Lower "
            "it, or raise this process's limit of address space (ulimit -v) or the host's "
            "(vm.overcommit_memory)."
        ) from error
    # A child process would get copies of locked pages.
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # Kernels without transparent huge pages refuse this.
        if error.errno != errno.EINVAL:
            raise
    return mapping


def _check_room(size: int) -> None:
    """Refuse more than the free memory: locked pages cannot be swapped, so the OOM killer would
    act."""
    free = free_memory_bytes()
    if size > free:
        raise ConfigError(
            f"{_SETTING}: {size} bytes of the host's memory are to be locked but {free} are "
            "free. Lower it, which is a rank's, or free memory on this host."
        )


def _refusal(size: int, error: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    allowed = "without a limit" if limit == resource.RLIM_INFINITY else f"up to {limit} bytes"
    return (
        f"{_SETTING}: {size} bytes of the host's memory cannot be locked (CUDA error {error}). "
        f"{free_memory_bytes()} are free, and this process may lock memory {allowed} "
        "(RLIMIT_MEMLOCK). Lower it, raise that limit (ulimit -l), or free memory on this host."
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
