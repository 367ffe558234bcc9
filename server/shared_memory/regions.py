"""The regions of a front end by name, and the tensors of requests in them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.shared_memory.cuda_memory import CudaRegion
from trimaran.server.shared_memory.region_specs import (
    Kind,
    RegionSlice,
    RegionSpec,
    unknown_region,
)
from trimaran.server.shared_memory.system_memory import SystemRegion

logger = logging.getLogger(__name__)

MAX_REGIONS = 1024
"""Regions of a server, each of which holds a file open in every front end."""

SIZE_MAX = (1 << 64) - 1
SHORT_COPY_BYTES = 64 << 10
"""Bytes that are copied without leaving the event loop."""

DISABLED = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to "
    "enable."
)
_NAMES = {"system": "system", "cuda": "CUDA"}


class _Region(Protocol):
    """Memory of a client. Closed with the last reference."""

    spec: RegionSpec

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of bytes inside the region."""
        ...

    def write(self, offset: int, parts: Sequence[bytes]) -> None:
        """Write bytes inside the region."""
        ...


@dataclass(frozen=True, slots=True)
class OpenSlice:
    """The slice of one tensor, which keeps its region open."""

    region: _Region
    offset: int
    num_bytes: int

    async def read(self) -> bytes:
        """A copy of the slice: the client may change the original while the request runs.

        Raises:
            RequestError: the memory is gone.
        """
        if self._is_short(self.num_bytes):
            return self.region.read(self.offset, self.num_bytes)
        return await asyncio.to_thread(self.region.read, self.offset, self.num_bytes)

    async def write(self, output: str, parts: Sequence[bytes]) -> None:
        """Write an output of a model.

        Raises:
            RequestError: the output is longer than the slice, or the memory is gone.
        """
        num_bytes = sum(map(len, parts))
        if num_bytes > self.num_bytes:
            raise RequestError(
                f"shared memory size specified with the request for output '{output}' "
                f"({self.num_bytes} bytes) should be at least {num_bytes} bytes to hold the "
                "results",
                ErrorKind.INTERNAL,
            )
        if self._is_short(num_bytes):
            self.region.write(self.offset, parts)
        else:
            await asyncio.to_thread(self.region.write, self.offset, parts)

    def _is_short(self, num_bytes: int) -> bool:
        return self.region.spec.kind == "system" and num_bytes <= SHORT_COPY_BYTES


class SharedRegions:
    """The regions that clients registered. Used on the event loop only.

    The first front end decides; others open the same regions (`follow`).
    """

    def __init__(self, *, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        self._specs: dict[str, RegionSpec] = {}
        self._open: dict[str, _Region] = {}

    async def register(self, spec: RegionSpec) -> None:
        """Open a region of a new name.

        Raises:
            RequestError: clients may not share memory, the name is taken, or the memory cannot
                be opened.
        """
        self.check_allowed()
        self._check_new(spec.name)
        if spec.kind == "system":
            region: _Region = SystemRegion(spec)
        else:
            region = await asyncio.to_thread(CudaRegion, spec)
            self._check_new(spec.name)
        self._specs[spec.name] = spec
        self._open[spec.name] = region

    def unregister(self, kind: Kind, name: str) -> None:
        """Forget a region, or all of a kind if ``name`` is empty. Requests under way keep their
        regions open.

        Raises:
            RequestError: clients may not share memory.
        """
        self.check_allowed()
        for each in [name] if name else list(self._specs):
            if each in self._specs and self._specs[each].kind == kind:
                self._forget(each)

    def status(self, kind: Kind, name: str) -> list[RegionSpec]:
        """A region, or all of a kind in the order of their names if ``name`` is empty.

        Raises:
            RequestError: there is no such region of this kind.
        """
        if not name:
            ordered = sorted(self._specs.items())
            return [spec for _, spec in ordered if spec.kind == kind]
        spec = self._specs.get(name)
        if spec is None:
            raise unknown_region(name, kind)
        if spec.kind != kind:
            raise RequestError(
                f"The region named '{name}' is registered as {_NAMES[spec.kind]} shared "
                f"memory, not {_NAMES[kind]} shared memory",
                ErrorKind.NOT_FOUND,
            )
        return [spec]

    async def find(self, part: RegionSlice) -> OpenSlice:
        """The memory of a slice.

        Raises:
            RequestError: there is no such region, or the slice exceeds the region.
        """
        spec = self._specs.get(part.region)
        if spec is None:
            raise unknown_region(part.region)
        if part.offset >= spec.num_bytes:
            raise RequestError(f"Invalid offset for shared memory region: '{part.region}'")
        if part.offset + part.num_bytes > SIZE_MAX:
            raise RequestError(
                f"Integer overflow detected: byte_size ({part.num_bytes}) + offset "
                f"({part.offset}) exceeds maximum value ({SIZE_MAX}) for region "
                f"'{part.region}'"
            )
        if part.offset + part.num_bytes > spec.num_bytes:
            raise RequestError(
                f"Invalid offset + byte size for shared memory region: '{part.region}'"
            )
        region = self._open.get(part.region)
        if region is None:
            # A CUDA region of the first front end, used here for the first time.
            region = await asyncio.to_thread(CudaRegion, spec)
            if self._specs.get(part.region) is spec:
                self._open[part.region] = region
        return OpenSlice(region, part.offset, part.num_bytes)

    def to_wire(self) -> list[dict[str, Any]]:
        """The regions, for other front ends."""
        return [spec.to_wire() for spec in self._specs.values()]

    def follow(self, wire: Iterable[Mapping[str, Any]]) -> None:
        """Have the regions of the first front end, and no others."""
        wanted = {spec.name: spec for spec in map(RegionSpec.from_wire, wire)}
        for name, spec in list(self._specs.items()):
            if wanted.get(name) != spec:
                self._forget(name)
        for name, spec in wanted.items():
            if name in self._specs:
                continue
            self._specs[name] = spec
            if spec.kind == "system":
                self._follow_system(spec)

    def _follow_system(self, spec: RegionSpec) -> None:
        # At once: clients may delete the file's name after the registration.
        try:
            self._open[spec.name] = SystemRegion(spec)
        except RequestError as error:
            logger.warning("region '%s' is not served here: %s", spec.name, error)
            del self._specs[spec.name]

    def _forget(self, name: str) -> None:
        del self._specs[name]
        self._open.pop(name, None)

    def check_allowed(self) -> None:
        """Raise a RequestError if clients may not share memory."""
        if not self._is_allowed:
            raise RequestError(DISABLED, ErrorKind.UNSUPPORTED)

    def _check_new(self, name: str) -> None:
        if name in self._specs:
            raise RequestError(
                f"shared memory region '{name}' already in manager", ErrorKind.ALREADY_EXISTS
            )
        if len(self._specs) >= MAX_REGIONS:
            raise RequestError(
                f"the server holds {MAX_REGIONS} shared memory regions, its limit. "
                "Unregister those that are no longer used.",
                ErrorKind.UNAVAILABLE,
            )
