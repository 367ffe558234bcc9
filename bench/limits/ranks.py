"""The ranks that run one measured engine: this process alone, or a job of mpirun."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import torch

from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import SingleRankGroup, TensorParallelGroup
from trimaran.comm.control.control_plane import ControlPlane, LocalControlPlane, connect_control
from trimaran.comm.errors import ConfigError, TrimaranError
from trimaran.comm.stages.world_group import WorldGroup
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig, ParallelConfig
from trimaran.worker.engine.engine import Engine
from trimaran.worker.execution.device import select_device

if TYPE_CHECKING:
    from trimaran.comm.mpi import World

_SILENCE_S = 300.0
"""Longest time between two steps: kernels are compiled in the first ones."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's coordinates, and its connections to the other ranks."""

    topology: ParallelLayout
    device: torch.device
    control: ControlPlane
    group: TensorParallelGroup
    all_ranks: WorldGroup = field(default_factory=WorldGroup)
    world: World | None = None
    """None for a single process, which needs no MPI."""

    ended: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """What is freed once no rank follows an engine any more."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank submits the requests and reports the results."""
        return self.topology.is_leader

    def of_all(self, value: Any) -> list[Any]:
        """The values of all ranks, on each of them. Collective."""
        return [value] if self.world is None else self.world.comm.allgather(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world is not None:
            self.world.comm.Barrier()

    def follow(self, engine: Engine) -> None:
        """Carry out the leader's steps until it closes the control plane."""
        while (decision := self.control.receive()) is not None:
            engine.follow(decision)


@contextlib.contextmanager
def connected(config: EngineConfig) -> Iterator[Ranks]:
    """The ranks of ``config.parallel``. Collective; an error on one rank ends all of them.

    Raises:
        ConfigError: this process is in a job of another size.
    """
    torch.set_num_threads(config.num_threads)
    parallel = config.parallel
    if parallel.world_size == 1:
        topology = ParallelLayout()
        device = select_device(config, topology)
        yield Ranks(topology, device, LocalControlPlane(), SingleRankGroup())
        return
    from trimaran.comm import mpi

    world = mpi.World.discover()
    topology = _place(parallel, world)
    try:
        device = select_device(config, topology)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        control = connect_control(world, _SILENCE_S)
        group = connect_group(world.subgroup(topology.tp_ranks), device, _SILENCE_S)
        shares_experts = parallel.expert_dp_size > 1
        all_ranks = WorldGroup.connect(
            world, topology, device, _SILENCE_S, shares_experts=shares_experts
        )
        ranks = Ranks(topology, device, control, group, all_ranks, world)
        yield ranks
        control.close()
        ranks.ended.close()
        group.close()
    except BaseException as error:
        # Other ranks would wait for this rank without end.
        if isinstance(error, TrimaranError):
            print(f"trimaran: rank {world.rank}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        mpi.abort(2 if isinstance(error, ConfigError) else 1)


def _place(parallel: ParallelConfig, world: World) -> ParallelLayout:
    if world.size != parallel.world_size:
        raise ConfigError(
            f"tp_size {parallel.tp_size} times pp_size {parallel.pp_size} times dp_size "
            f"{parallel.dp_size} needs {parallel.world_size} ranks but {world.size} run. Start "
            f"the command by mpirun -n {parallel.world_size}, or correct the sizes."
        )
    return ParallelLayout(
        rank=world.rank,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        dp_size=parallel.dp_size,
        hosts=world.hosts,
    )


def memory_of(engine: Engine) -> dict[str, float]:
    """GB of this rank: weights, KV cache, and the total in use: the peak of a GPU's memory,
    or the current memory of the process.
    """
    model = engine.runner.model
    weights = model.num_weight_bytes + sum(each.nbytes for each in model.buffers())
    pools = [group.memory for group in engine.runner.groups if group.memory is not None]
    if engine.device.type == "cuda":
        used = torch.cuda.max_memory_reserved(engine.device)
    else:
        used = psutil.Process().memory_info().rss
    cache = sum(pool.numel() * pool.element_size() for pool in pools)
    sizes = {"weights": weights, "kv_cache": cache, "used": used}
    if (table := model.first_layer_table) is not None:
        sizes["first_layer_table"] = table.numel() * table.element_size()
    return {name: round(size / 1e9, 3) for name, size in sizes.items()}
