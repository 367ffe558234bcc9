"""All links of a rank to ranks outside its tensor group: stages, results, reports."""

from __future__ import annotations

from typing import Any

import torch

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.control.result_link import ResultReader, ResultWriter, connect_results
from trimaran.comm.deadlines import StepTimeouts
from trimaran.comm.mpi import World
from trimaran.comm.stages import peer_memory_links, torch_links
from trimaran.comm.stages.shared_memory_links import connect_shared
from trimaran.comm.stages.stage_links import HiddenShape, StageReceiver, StageSender
from trimaran.comm.topology import ParallelLayout

_EXTRA_SLOTS = 2
"""Slots of a link in addition to one a stage: one more step may be in flight, and the slot that
is being read is not free yet."""


def connect_stages(
    stages: World, shape: HiddenShape, device: torch.device, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """This rank's links to the preceding and the next stage.

    Collective over the world that ``stages`` is a part of; each rank passes the ranks of its
    own pipeline, first stage first. GPUs of one host use each other's mapped memory if
    possible, and NCCL otherwise. CPU ranks of one host use shared memory, CPU ranks of several
    hosts gloo.
    """
    is_one_host = len(set(stages.hosts)) == 1
    if device.type == "cuda":
        if is_one_host:
            ends = peer_memory_links.connect_peers(stages, shape, device, timeout_s)
            if ends is not None:
                return ends
        return torch_links.connect_nccl(stages, shape, device, timeout_s)
    if is_one_host:
        return connect_shared(stages, shape, timeout_s)
    return torch_links.connect_gloo(stages, shape, timeout_s)


class PipelineLinks:
    """The links of one rank to its neighbouring stages, and for results.

    Decisions come over the control plane. Hidden states go from each rank of a stage to the
    rank of the same tensor position in the next stage. Sampled tokens go from tensor rank 0 of
    the last stage to rank 0. A rank of an engine with one stage has no links.
    """

    def __init__(self) -> None:
        self.previous: StageReceiver | None = None
        self.next: StageSender | None = None
        self.writer: ResultWriter | None = None
        self.readers: dict[int, ResultReader] = {}
        """On rank 0, by the rank that sends results."""
        self.report_writer: ResultWriter | None = None
        self.report_readers: dict[int, ResultReader] = {}
        """The same for occasional reports of the first rank of each stage and dp rank."""
        self.expert_ranks: TensorParallelGroup | None = None
        """The ranks of all dp ranks that hold this rank's layers, if they share experts."""
        self.is_first_dp_rank = True
        """Whether this rank belongs to dp rank 0."""
        self._world: World | None = None
        self._timeout_s = float("inf")

    @classmethod
    def connect(cls, world: World, topology: ParallelLayout, timeout_s: float) -> PipelineLinks:
        """Links for results; `open` connects the stages. Collective over ``world``."""
        links = cls()
        if world.size > 1:
            links._world = world
            output_ranks = [
                topology.output_rank_of(dp_rank) for dp_rank in range(topology.dp_size)
            ]
            output_ranks = [rank for rank in output_ranks if rank > 0]
            links.writer, links.readers = connect_results(world, output_ranks, timeout_s)
        links._timeout_s = timeout_s
        links.is_first_dp_rank = topology.dp_rank == 0
        return links

    def open(
        self,
        topology: ParallelLayout,
        device: torch.device,
        sizes: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Connect the stages for steps of ``sizes``: most tokens, hidden size.

        Collective over the world.
        """
        if topology.pp_size == 1:
            return
        assert self._world is not None, "stages were not connected"
        stages = self._world.subgroup(topology.pp_ranks)
        shape = HiddenShape(*sizes, dtype, topology.pp_size + _EXTRA_SLOTS)
        self.previous, self.next = connect_stages(stages, shape, device, self._timeout_s)
        if self.previous is not None:
            self.previous.peer = topology.rank - topology.tp_size
        if self.next is not None:
            self.next.peer = topology.rank + topology.tp_size

    def open_reports(self, topology: ParallelLayout) -> None:
        """Connect the first ranks of all other stages and dp ranks to rank 0, for reports.

        Collective over the world.
        """
        if self._world is None or topology.tp_size == topology.world_size:
            return
        first_ranks = range(topology.tp_size, topology.world_size, topology.tp_size)
        ends = connect_results(self._world, first_ranks, self._timeout_s)
        self.report_writer, self.report_readers = ends

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, in order of ranks. Collective over the world; while loading.

        Raises:
            PeerLostError: a rank did not arrive in time.
        """
        if self._world is None:
            return [value]
        self._world.barrier(self._timeout_s, "an agreement while loading")
        values: list[Any] = self._world.comm.allgather(value)
        return values

    def minimum(self, value: int) -> int:
        """The smallest of all ranks' values; see `all_gather`."""
        return int(min(self.all_gather(value)))

    def set_timeouts(self, waits: StepTimeouts) -> None:
        """Set the longest waits for other ranks."""
        self._timeout_s = waits.results_s
        readers = [*self.readers.values(), *self.report_readers.values()]
        for end in [self.next, self.writer, self.report_writer, *readers]:
            if end is not None:
                end.timeout_s = waits.results_s
        if self.previous is not None:
            self.previous.timeout_s = waits.hidden_s
        if self.expert_ranks is not None:
            self.expert_ranks.timeout_s = waits.experts_s

    def transports(self) -> dict[str, str]:
        """The transports of hidden states and results, for the log and the metrics."""
        end = self.previous or self.next
        names = {} if end is None else {"stages": end.transport}
        if self.expert_ranks is not None:
            names["expert_all_to_all"] = self.expert_ranks.transport_of(1)
        told = sorted({reader.transport for reader in self.readers.values()})
        return {**names, "results": "+".join(told)} if told else names

    def close(self) -> None:
        """Free this rank's ends. Collective over dp ranks that share experts."""
        if self.expert_ranks is not None:
            self.expert_ranks.close()
        readers = [*self.readers.values(), *self.report_readers.values()]
        for end in [self.previous, self.next, self.writer, self.report_writer, *readers]:
            if end is not None:
                end.close()
