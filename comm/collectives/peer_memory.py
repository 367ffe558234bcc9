"""Memory on every GPU of a group that all its ranks map, for kernels that read each other's."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from trimaran.comm.collectives.torch_groups import NcclGroup
from trimaran.comm.errors import ConfigError

_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Regions of equal size, one a rank; freed with this object, on all ranks at once."""

    own: torch.Tensor
    """This rank's region as bytes."""

    addresses: list[int]
    """Where this rank finds the region of each, its own included."""

    handle: Any
    """Torch's, which keeps the others' regions mapped."""


def map_peer_memory(group: NcclGroup, num_bytes: int) -> PeerMemory:
    """A zeroed region on each GPU of ``group``. Collective.

    Raises:
        ConfigError: these GPUs cannot map each other's memory.
    """
    # Imported only now: it takes a second, and only GPUs need it.
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    try:
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=group.device)
        own.zero_()
        handle = symmetric.rendezvous(own, group.handle.group_name)
    except RuntimeError as error:
        # Where the others wait for all ranks, before they can hear of it.
        group.barrier()
        raise ConfigError(
            f"the GPUs of this tensor group cannot map each other's memory ({error})"
        ) from error
    bases = [int(address) for address in handle.buffer_ptrs]
    # Regions of one size begin at one place of what torch allocated for them.
    offset = own.data_ptr() - bases[group.rank]
    # Nobody reads before all are zero.
    group.barrier()
    return PeerMemory(own, [base + offset for base in bases], handle)


def why_memory_is_apart(group: NcclGroup) -> str:
    """Why the GPUs of ``group`` should not be asked to share memory, as far as that can be
    told before they try; empty where this rank sees no reason. Collective.

    Access alone is no ground to try: between cards on PCI Express it may be promised and
    still not work, and who waits for a flag there waits for ever. Atomic operations on each
    other's memory are what GPUs do over NVLink.
    """
    own = torch.cuda.current_device()
    devices = group.all_gather(torch.tensor([own], device=group.device), 0).tolist()
    if len(set(devices)) < group.size or max(devices) >= torch.cuda.device_count():
        return "its ranks do not see each other's GPUs"
    for device in devices:
        if device != own and not _reaches(own, device):
            return f"GPU {own} has no atomic access to the memory of GPU {device}"
    return ""


def _reaches(own: int, peer: int) -> bool:
    if not torch.cuda.can_device_access_peer(own, peer):
        return False
    value = ctypes.c_int()
    ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    return ask(ctypes.byref(value), _NATIVE_ATOMICS, own, peer) == 0 and value.value == 1
