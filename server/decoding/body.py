"""Request bodies: short ones as bytes, long ones outside the memory of their receiver."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import TypeAlias

from trimaran.server.inference.tensor_bytes import Buffer

SHORT_BYTES = 256 << 10
"""A body up to this is decoded sooner than it is sent elsewhere: within some 30 ms."""


LONG_BYTES = 1 << 20
"""Work over this size runs alone in its kind: a megabyte of JSON may become 30 MB of values."""


class LongBody:
    """A file without a name, in memory, that a helper process reads without a copy.

    The memory ends with the last descriptor and the last view. Not safe for two threads.
    """

    def __init__(self, parts: Iterable[Buffer] = ()) -> None:
        self._fd = os.memfd_create("request-body")
        self._num_bytes = 0
        for part in parts:
            self.append(part)

    def append(self, part: Buffer) -> None:
        """Write a part behind the others.

        Raises:
            OSError: there is no memory for it.
        """
        rest = memoryview(part)
        self._num_bytes += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def __len__(self) -> int:
        return self._num_bytes

    def fileno(self) -> int:
        """The descriptor, which stays this object's."""
        return self._fd

    def view(self) -> memoryview:
        """The bytes, mapped for as long as the view is used."""
        return mapped(self._fd, self._num_bytes)

    def __del__(self) -> None:
        os.close(self._fd)


Body: TypeAlias = bytes | LongBody


class BodyBuilder:
    """A body as its parts come."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._long: LongBody | None = None
        self.num_bytes = 0

    def append(self, part: bytes) -> None:
        """Add a part behind the others.

        Raises:
            OSError: there is no memory for it.
        """
        self.num_bytes += len(part)
        if self._long is None and self.num_bytes > SHORT_BYTES:
            self._long = LongBody(self._parts)
            self._parts = []
        if self._long is None:
            self._parts.append(part)
        else:
            self._long.append(part)

    def finish(self) -> Body:
        """The body of all parts."""
        return b"".join(self._parts) if self._long is None else self._long


def view_of(body: Body) -> memoryview:
    """The bytes of a body."""
    return body.view() if isinstance(body, LongBody) else memoryview(body)


def mapped(fd: int, num_bytes: int) -> memoryview:
    """The first bytes of an open file, read-only."""
    if num_bytes == 0:
        return memoryview(b"")
    return memoryview(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ))
