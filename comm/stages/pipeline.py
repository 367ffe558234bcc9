"""All links of a rank to ranks outside its tensor group: stages, results, reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.control.result_link import ResultReader, ResultWriter, connect_results
from trimaran.comm.deadlines import StepTimeouts
from trimaran.comm.mpi import World
from trimaran.comm.stages import peer_memory_links, torch_links
from trimaran.comm.stages.shared_memory_links import connect_shared
from trimaran.comm.stages.stage_links import HiddenShape, StageReceiver, StageSender
from trimaran.comm.stages.world_group import WorldGroup
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


@dataclass(frozen=True, slots=True)
class PipelineLinks:
    """The links of one rank to its neighbouring stages, for results and for reports.

    Decisions come over the control plane. Hidden states go from each rank of a stage to the
    rank of the same tensor position in the next stage. Sampled tokens go from tensor rank 0 of
    the last stage to rank 0. A rank of an engine with one stage has no links.
    """

    group: WorldGroup = field(default_factory=WorldGroup)
    previous: StageReceiver | None = None
    next: StageSender | None = None
    writer: ResultWriter | None = None
    readers: Mapping[int, ResultReader] = field(default_factory=dict)
    """On rank 0, by the rank that sends results."""

    report_writer: ResultWriter | None = None
    report_readers: Mapping[int, ResultReader] = field(default_factory=dict)
    """The same for occasional reports of the first rank of each stage and dp rank."""

    is_first_dp_rank: bool = True
    """Whether this rank belongs to dp rank 0."""

    @classmethod
    def connect(
        cls,
        group: WorldGroup,
        topology: ParallelLayout,
        device: torch.device,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        *,
        has_reports: bool = False,
    ) -> PipelineLinks:
        """Links for steps of ``sizes``: most tokens, hidden size. Collective over the world.

        With reports, the first ranks of all other stages and dp ranks are connected to rank 0.
        """
        world, timeout_s = group.world, group.timeout_s
        if world is None:
            return cls(group)
        outputs = [topology.output_rank_of(dp_rank) for dp_rank in range(topology.dp_size)]
        writer, readers = connect_results(world, [rank for rank in outputs if rank], timeout_s)
        if writer is not None:
            writer.on_failure = group.on_failure
        previous: StageReceiver | None = None
        following: StageSender | None = None
        if topology.pp_size > 1:
            shape = HiddenShape(*sizes, dtype, topology.pp_size + _EXTRA_SLOTS)
            stages = world.subgroup(topology.pp_ranks)
            previous, following = connect_stages(stages, shape, device, timeout_s)
        if previous is not None:
            previous.peer = topology.rank - topology.tp_size
        if following is not None:
            following.peer = topology.rank + topology.tp_size
        reports: tuple[ResultWriter | None, Mapping[int, ResultReader]] = None, {}
        if has_reports and topology.tp_size < topology.world_size:
            first_ranks = range(topology.tp_size, topology.world_size, topology.tp_size)
            reports = connect_results(world, first_ranks, timeout_s)
        is_first = topology.dp_rank == 0
        return cls(group, previous, following, writer, readers, *reports, is_first)

    @property
    def expert_ranks(self) -> TensorParallelGroup | None:
        """The ranks that share this rank's experts, if dp ranks do."""
        return self.group.expert_ranks

    def set_timeouts(self, waits: StepTimeouts) -> None:
        """Set the longest waits for other ranks."""
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
