"""Large payloads between processes of one host, in anonymous shared memory."""

from __future__ import annotations

import itertools
import mmap
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import StepOutput

INLINE_BYTES = 64 << 10
"""Bytes up to which payloads are part of the message itself."""

_MAPPED_BYTES = 16 << 20
_POPULATED = mmap.MAP_SHARED | mmap.MAP_POPULATE

Handle = list[int]
"""Process id, descriptor, size in bytes, and the number that `release` takes."""

BULKY = ("context_logits", "generation_logits")
"""Extras that are lists of bytes."""

MAX_REMOTE_BYTES = 32 << 20
"""Most logits of one message to another host, where no memory can be shared."""


class BulkSender:
    """The sending end. Memory is kept until its receiver releases it or is lost.

    The memory has no name in a file system: the kernel frees the memory when the last process
    that maps it ends, even by a crash.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, dict[int, int]] = defaultdict(dict)
        # A thread writes some payloads while the main thread writes others.
        self._numbers = itertools.count(1)

    @property
    def num_held(self) -> int:
        """Payloads that are not released yet."""
        return sum(map(len, self._held.values()))

    def put(self, receiver: Hashable, parts: Iterable[memoryview]) -> Handle:
        """Write the parts one after another into new memory; returns the handle for
        `open_bulk`.

        Raises:
            OSError: the host has no memory left.
        """
        fd = os.memfd_create("trimaran-bulk", os.MFD_CLOEXEC)
        num_bytes = 0
        try:
            for part in parts:
                view = part.cast("B")
                num_bytes += len(view)
                while view:
                    view = view[os.write(fd, view) :]
        except OSError:
            os.close(fd)
            raise
        number = next(self._numbers)
        self._held[receiver][number] = fd
        return [os.getpid(), fd, num_bytes, number]

    def release(self, receiver: Hashable, numbers: Iterable[int]) -> None:
        """Free payloads that the receiver has opened or refused; ignores unknown payloads."""
        held = self._held.get(receiver, {})
        for number in numbers:
            if number in held:
                os.close(held.pop(number))

    def drop(self, receiver: Hashable) -> None:
        """The receiver is lost: free its payloads."""
        for fd in self._held.pop(receiver, {}).values():
            os.close(fd)


def open_bulk(handle: Handle) -> memoryview:
    """A read-only view of a payload. A large payload is mapped, and takes a file descriptor
    while the view lives; a small payload is copied.

    Raises:
        ProtocolError: the memory cannot be opened, or is too short.
    """
    pid, fd, num_bytes, _ = handle
    path = f"/proc/{pid}/fd/{fd}"
    try:
        with open(path, "rb", buffering=0) as file:
            if num_bytes >= _MAPPED_BYTES:
                return memoryview(
                    mmap.mmap(file.fileno(), num_bytes, _POPULATED, mmap.PROT_READ)
                )
            payload = np.empty(num_bytes, dtype=np.uint8).data
            start = 0
            while start < num_bytes:
                count = file.readinto(payload[start:])
                if not count:
                    raise ProtocolError(f"{path} ends after {start} of {num_bytes} bytes")
                start += count
    except OSError as error:
        raise ProtocolError(
            f"cannot open {num_bytes} bytes of process {pid} ({path}): {error}. Front end and "
            "ranks of a host must run as one user with /proc mounted."
        ) from error
    return payload


def bulky_bytes(output: StepOutput) -> int:
    """Bytes of the extras that `pack` may move."""
    return sum(
        memoryview(item).nbytes
        for extras in output.extras.values()
        for name in BULKY
        for item in extras.get(name, ())
    )


def pack(output: StepOutput, receiver: Hashable, sender: BulkSender | None) -> None:
    """Move large extras from the message to shared memory; without ``sender`` they stay."""
    lists = [
        (extras, name) for extras in output.extras.values() for name in BULKY if name in extras
    ]
    parts = [memoryview(item).cast("B") for extras, name in lists for item in extras[name]]
    if sender is None or sum(map(len, parts)) <= INLINE_BYTES:
        return
    output.bulk = sender.put(receiver, parts)
    start = 0
    for extras, name in lists:
        lengths = [memoryview(item).nbytes for item in extras[name]]
        extras[name] = [[start, *lengths]]
        start += sum(lengths)


def unpack(output: StepOutput) -> dict[int, dict[str, Any]]:
    """The extras by row, with the payloads of `pack` in place.

    Rows that share a payload are copied up to a size, so that a row that is kept for long keeps
    no others.

    Raises:
        ProtocolError: the memory cannot be opened.
    """
    if not output.bulk:
        return output.extras
    payload = open_bulk(output.bulk)
    for extras in output.extras.values():
        for name in BULKY:
            if name in extras:
                ((start, *lengths),) = extras[name]
                if name == "context_logits":
                    # The chunks of a prompt are contiguous, so they need not be joined later.
                    lengths = [sum(lengths)]
                extras[name] = items = []
                for length in lengths:
                    part = payload[start : start + length]
                    is_kept_alone = len(output.extras) > 1 and length < _MAPPED_BYTES
                    items.append(bytes(part) if is_kept_alone else part)
                    start += length
    return output.extras
