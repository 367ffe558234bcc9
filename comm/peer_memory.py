"""Memory on every GPU of a group that all its ranks map, for kernels that read each other's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.process_group import NcclGroup


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
        raise ConfigError(
            f"the GPUs of this tensor group cannot map each other's memory ({error}), as "
            "--all-reduce peer needs. Serve with --all-reduce nccl."
        ) from error
    bases = [int(address) for address in handle.buffer_ptrs]
    # Regions of one size begin at one place of what torch allocated for them.
    offset = own.data_ptr() - bases[group.rank]
    # Nobody reads before all are zero.
    group.barrier()
    return PeerMemory(own, [base + offset for base in bases], handle)
