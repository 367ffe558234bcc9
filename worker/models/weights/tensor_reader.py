"""Reads tensors of safetensors files into a device's memory with several threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import local
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.shard_file import CHUNK_BYTES, TensorEntry, read_tensor_entries
from trimaran.worker.models.weights.verification import ShardVerifier, read_whole

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that are read, by the words of the format."""


class _Staged(NamedTuple):
    """A tensor that is being copied to the device."""

    name: str
    tensor: Tensor
    copies: list[Future[torch.cuda.Event | None]]


class _Stage:
    """One thread's page-locked memory: two buffers, one being read while the other is
    copied."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        is_gpu = device.type == "cuda"
        self._chunks = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._stream = torch.cuda.Stream(device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._turn = 0

    def load(
        self,
        file: int,
        start: int,
        target: Tensor,
        ready: torch.cuda.Event | None,
        check: Callable[[memoryview], None] | None,
    ) -> torch.cuda.Event | None:
        """Fill ``target``, bytes on the device, from position ``start`` of a file.

        ``ready`` is when the target's memory may be written. ``check`` sees the bytes first.
        """
        self._turn ^= 1
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        chunk = self._chunks[self._turn][: len(target)]
        data = _bytes_of(chunk)
        read_whole(file, start, data)
        if check is not None:
            check(data)
        if self._stream is None:
            target.copy_(chunk)
            return None
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            target.copy_(chunk, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._copied[self._turn] = event
        return event


class TensorReader:
    """Reads whole tensors into the memory of one device.

    Threads read chunks of a file into page-locked buffers of their own, and the device copies
    the chunks meanwhile; reading releases Python's lock. A file in the page cache arrives about
    as fast as the bus allows. Another file is read with one request a thread at a time. At most
    ``max_ahead_bytes`` are on the device in addition to the caller's tensors.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        num_threads: int = 8,
        chunk_bytes: int = CHUNK_BYTES,
        max_ahead_bytes: int = 2 << 30,
    ) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._max_ahead_bytes = max_ahead_bytes
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._local = local()

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def read(
        self, path: Path, names: Iterable[str], verifier: ShardVerifier | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The named tensors of a file, in the order of their places there.

        ``verifier`` compares the chunks as they are read, in the same threads.

        A tensor's values are there for what the current stream does next. Its memory is
        used again once the caller has let go of it.

        Raises:
            ConfigError: the file is not whole, differs from its checksums, or holds a type of
                number that is not known.
        """
        entries = read_tensor_entries(path)
        wanted = sorted((entries[name].start, name) for name in names)
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
        staged: deque[_Staged] = deque()
        num_ahead = 0
        try:
            for _, name in wanted:
                entry = entries[name]
                while staged and num_ahead + entry.num_bytes > self._max_ahead_bytes:
                    num_ahead -= staged[0].tensor.nbytes
                    yield self._arrived(staged.popleft(), path)
                staged.append(self._stage(file, path, name, entry, verifier))
                num_ahead += entry.num_bytes
            while staged:
                yield self._arrived(staged.popleft(), path)
        finally:
            _give_up(staged)
            os.close(file)

    def _stage(
        self,
        file: int,
        path: Path,
        name: str,
        entry: TensorEntry,
        verifier: ShardVerifier | None,
    ) -> _Staged:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(
                f"{path}: the tensor {name!r} holds {entry.dtype}, which is not served. Served "
                f"are {', '.join(DTYPES)}."
            )
        whole = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self._device)
        ready: torch.cuda.Event | None = None
        if whole.is_cuda:
            # The current stream may still read another tensor in this memory.
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        copies = []
        for offset in range(0, entry.num_bytes, self._chunk_bytes):
            target = whole[offset : offset + self._chunk_bytes]
            check = None if verifier is None else partial(verifier.check, name, offset)
            copies.append(
                self._pool.submit(self._load, file, entry.start + offset, target, ready, check)
            )
        return _Staged(name, whole.view(dtype).view(entry.shape), copies)

    def _load(
        self,
        file: int,
        start: int,
        target: Tensor,
        ready: torch.cuda.Event | None,
        check: Callable[[memoryview], None] | None,
    ) -> torch.cuda.Event | None:
        stage: _Stage | None = getattr(self._local, "stage", None)
        if stage is None:
            stage = self._local.stage = _Stage(self._device, self._chunk_bytes)
        return stage.load(file, start, target, ready, check)

    def _arrived(self, staged: _Staged, path: Path) -> tuple[str, Tensor]:
        for copy in staged.copies:
            try:
                event = copy.result()
            except OSError as error:
                raise ConfigError(
                    f"{path}: cannot be read: {error.strerror or error}."
                ) from None
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        return staged.name, staged.tensor


def _give_up(staged: Iterable[_Staged]) -> None:
    """Cancel or await all reads, so that the file can be closed."""
    copies = [copy for one in staged for copy in one.copies]
    for copy in reversed(copies):
        copy.cancel()
    wait(copies)


def _bytes_of(chunk: Tensor) -> memoryview:
    return memoryview(chunk.numpy())  # type: ignore[arg-type]
