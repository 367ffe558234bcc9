"""Regions and slices of regions, as clients name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trimaran.comm.errors import ErrorKind, RequestError

Kind = Literal["system", "cuda"]


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """The slice of a region that holds one tensor, not yet looked up."""

    region: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSpec:
    """A region as its client registers it."""

    kind: Kind
    name: str
    num_bytes: int
    key: str = ""
    """Name of the file in /dev/shm; of system regions."""

    offset: int = 0
    """Start of the region in the file; of system regions."""

    device_id: int = 0
    raw_handle: bytes = b""
    """``cudaIpcMemHandle_t``; of CUDA regions."""

    def to_wire(self) -> dict[str, Any]:
        """Plain values, for msgpack."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> RegionSpec:
        """The inverse of `to_wire`."""
        return cls(**wire)


def invalid_args(name: str) -> RequestError:
    """The error of a region that does not fit its memory."""
    return RequestError(f"failed to register shared memory region '{name}': invalid args")


def no_address_space(name: str) -> RequestError:
    """The error of a region without bytes."""
    return RequestError(
        f"failed to register shared memory region '{name}': unable to process address "
        "spaceInvalid argument"
    )


def invalid_handle() -> RequestError:
    """The error of a CUDA handle that cannot be opened."""
    return RequestError("failed to register shared memory region: invalid args")


def no_gpus(name: str) -> RequestError:
    """The error of a CUDA region on a host without a GPU."""
    return RequestError(
        f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
    )


def unknown_region(name: str, kind: str = "") -> RequestError:
    """The error of a region that was never registered, or no longer is."""
    of_kind = f"{kind} " if kind else ""
    return RequestError(
        f"Unable to find {of_kind}shared memory region: '{name}'", ErrorKind.NOT_FOUND
    )
