"""All ranks of an engine: how they agree while loading, and which of them share experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.mpi import World
from trimaran.comm.topology import ParallelLayout


@dataclass(frozen=True, slots=True)
class WorldGroup:
    """The ranks of one engine. The default is an engine of one rank, which has no peers."""

    world: World | None = None
    """None for an engine of one rank."""

    timeout_s: float = float("inf")
    """The longest wait for another rank while loading."""

    expert_ranks: TensorParallelGroup | None = None
    """The ranks of all dp ranks that hold this rank's layers, if they share experts."""

    on_failure: Callable[[BaseException], None] | None = None
    """Called with an error of the thread that sends results."""

    @classmethod
    def connect(
        cls,
        world: World,
        topology: ParallelLayout,
        device: torch.device,
        timeout_s: float,
        *,
        shares_experts: bool,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> WorldGroup:
        """The ranks of ``world``, whose dp ranks may share experts. Collective over it."""
        experts: TensorParallelGroup | None = None
        if shares_experts:
            experts = connect_group(world.subgroup(topology.stage_ranks), device, timeout_s)
        return cls(world if world.size > 1 else None, timeout_s, experts, on_failure)

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in order of ranks. Collective over the world; while loading.

        Raises:
            PeerLostError: a rank did not arrive in time.
        """
        if self.world is None:
            return [value]
        self.world.barrier(self.timeout_s, "an agreement while loading")
        values: list[Any] = self.world.comm.allgather(value)
        return values

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values; see `all_gather`."""
        return int(min(self.all_gather(value)))
