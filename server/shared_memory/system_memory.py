"""Regions in POSIX shared memory, read and written through a descriptor.

A mapping would let a client end the server: access behind the end of a file that was shortened
after its registration is a SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.shared_memory.region_specs import (
    RegionSpec,
    invalid_args,
    no_address_space,
)

FOLDER = "/dev/shm"
_LONGEST_NAME_BYTES = 255
TRITON_PREFIX = "triton_python_backend_shm_region_"
_RESERVED = (
    TRITON_PREFIX, "trimaran-", "sem.", "nccl-", "mpich_shm_", "vader_segment.", "sm_segment.",
    "ucx_shm_posix_", "torch_",
)  # fmt: skip
"""Beginnings of the names that the server's own processes and their libraries use."""


class SystemRegion:
    """A part of a file in /dev/shm, open until the last request with it has ended."""

    def __init__(self, spec: RegionSpec) -> None:
        """Open the file of a region.

        Raises:
            RequestError: the key is reserved or names no file that the server may read and
                write, or the file is shorter than the region's end.
        """
        self.spec = spec
        self._fd = _opened(spec)
        try:
            if spec.offset + spec.num_bytes > os.fstat(self._fd).st_size:
                raise invalid_args(spec.name)
            if spec.num_bytes == 0:
                raise no_address_space(spec.name)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of some bytes. Takes as long as they take to copy.

        Raises:
            RequestError: the client has shortened the file meanwhile.
        """
        parts, start, end = [], self.spec.offset + offset, self.spec.offset + offset + num_bytes
        while start < end:
            part = os.pread(self._fd, end - start, start)
            if not part:
                raise self._shortened()
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset: int, parts: Sequence[bytes]) -> None:
        """Write bytes, which fit the region. Takes as long as they take to copy.

        Raises:
            RequestError: the client has shortened the file meanwhile, or has no memory for it.
        """
        start = self.spec.offset + offset
        # A write behind the end would make the file longer.
        if start + sum(map(len, parts)) > os.fstat(self._fd).st_size:
            raise self._shortened()
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    written = os.pwrite(self._fd, rest, start)
                    rest, start = rest[written:], start + written
        except OSError as error:
            raise RequestError(
                f"shared memory region '{self.spec.name}' cannot be written: {error.strerror}",
                ErrorKind.INTERNAL,
            ) from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def _shortened(self) -> RequestError:
        return RequestError(
            f"the file of shared memory region '{self.spec.name}' has become shorter since its "
            "registration. Register the region again."
        )


def _opened(spec: RegionSpec) -> int:
    name = spec.key.lstrip("/")
    for prefix in _RESERVED:
        if name.startswith(prefix):
            raise RequestError(
                f"cannot register shared memory region '{spec.name}' with key '{spec.key}' as "
                f"the key contains the reserved prefix '{prefix}'"
            )
    unable = RequestError(
        f"Unable to open shared memory region: '{spec.key}'", ErrorKind.INTERNAL
    )
    raw = os.fsencode(name)
    is_name = 0 < len(raw) <= _LONGEST_NAME_BYTES and name not in (".", "..")
    if not is_name or "/" in name or "\0" in name:
        raise unable
    try:
        # A pipe or a device of this name neither blocks nor counts.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"{FOLDER}/{name}", flags)
    except OSError:
        raise unable from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise unable
    return fd
