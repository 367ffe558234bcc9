"""Which waiting sequences start, when, and which running sequence is preempted for them.

A new policy is one class in one file: derive it from `AdmissionPolicy`, override what it
decides differently, and name it by its import path, ``package.module.Class``, where a built-in
policy has its short name (`SchedulerConfig.policy`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from trimaran.comm.errors import ConfigError
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.requests.request import RequestStatus, Sequence
from trimaran.worker.scheduling.kv_forecast import KVForecast
from trimaran.worker.scheduling.preemption import RecomputeCost, ResumeRotation
from trimaran.worker.scheduling.resources import SwapIns
from trimaran.worker.scheduling.waiting_queue import WaitingQueue

_WATERMARK = 0.01
"""Share of the blocks that admission leaves free for the growth of running sequences."""

_RETRY_STEPS = 16
"""Steps until admission is tried again after the forecast said no, unless a sequence ends."""


@dataclass(slots=True)
class Batch:
    """The sequences with a row, as a policy sees them while a step is planned; for reading."""

    step: int = 0
    """The step being planned."""

    running: list[Sequence] = field(default_factory=list)
    """In order of `Sequence.key`. The last one is preempted first."""

    swap_ins: SwapIns = field(default_factory=SwapIns)
    """Sequences whose prefix is being copied from the host cache."""

    @property
    def num_sequences(self) -> int:
        """Sequences that run, or will once their prefix is copied."""
        return len(self.running) + self.swap_ins.num_unfinished


class AdmissionPolicy:
    """Owns the waiting queue and decides about admission. This base admits in queue order.

    In each step the scheduler asks for a `victim`, schedules the running sequences, calls
    `begin_admission`, and then takes the queue's first sequence as long as the policy `admits`
    it and rows, blocks and tokens suffice. The first sequence that cannot start stops
    admission, so none is overtaken forever. All decisions are made on rank 0.
    """

    reserves_output: ClassVar[bool] = True
    """A sequence starts only with blocks reserved for its longest output, so running sequences
    never lack blocks. If False, the scheduler preempts the last one when blocks run out."""

    whole_batches: ClassVar[bool] = False
    """Sequences start only when no other runs."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        adapters: AdapterManager | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.queue = WaitingQueue(cache, adapters)

    # ---- what a policy decides -----------------------------------------------------------

    def rank(self, sequence: Sequence) -> tuple[int, ...]:
        """Order in the queue within one priority, smallest first; ties go by arrival.

        As many numbers for every sequence, none of them negative. Asked once, when the sequence
        is queued. The reverse order is the order of preemption.
        """
        return ()

    def begin_admission(self, batch: Batch) -> None:
        """`admits` is called from now on, with nothing but starts in between."""

    def admits(self, sequence: Sequence, batch: Batch) -> bool:
        """Whether the first sequence of the queue may start. If not, none starts in this step.

        An empty batch must admit: the engine ends with an error if nothing runs or starts.
        """
        return True

    def watermark(self, sequence: Sequence, batch: Batch) -> int:
        """Blocks that must stay free beside those of ``sequence`` as it starts."""
        return 0

    def victim(self, batch: Batch) -> Sequence | None:
        """A running sequence to preempt before the step is planned; None for none."""
        return None

    def sequence_ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence ended. It still has its row if it ran."""

    # ---- the queue -----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        sequence.key = (sequence.key[0], *self.rank(sequence), *sequence.key[1:])
        self.queue.add(sequence)

    def add_forks(self, parents: Iterable[Sequence]) -> None:
        """Queue the siblings of sequences whose prompt is computed."""
        for parent in parents:
            for sibling in parent.request.sequences[1:]:
                if sibling.status is RequestStatus.NEW:
                    self.add(sibling)


class GuaranteedNoEvict(AdmissionPolicy):
    """Reserves blocks for the longest output. A sequence that runs is never preempted."""


class StaticBatch(AdmissionPolicy):
    """Like `GuaranteedNoEvict`, and a batch runs until its last sequence has ended."""

    whole_batches = True


class MaxUtilization(AdmissionPolicy):
    """Starts sequences without reserving blocks for their output.

    A sequence starts if all sequences are expected to end before the blocks run out
    (`KVForecast`), or if a preemption would cost less than the row that stays unused
    (`RecomputeCost`). With a host cache, preempted sequences take turns with running ones
    (`ResumeRotation`).
    """

    reserves_output = False

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        adapters: AdapterManager | None = None,
    ) -> None:
        super().__init__(config, cache, adapters)
        self._never_full = cache.holds(config.max_num_seqs, config.max_seq_len)
        """The cache holds all rows at their longest."""
        self._forecast = KVForecast(config.expected_output_tokens)
        self._rotation = ResumeRotation(cache)
        self._recompute = RecomputeCost(cache, config.tokens_per_read)
        self._full_until = 0
        """The step before which no room is expected for another sequence."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        if sequence.beams is not None:
            self._forecast.has_beams = True
        super().add(sequence)

    def begin_admission(self, batch: Batch) -> None:
        """The forecast looks at the running sequences once per admission."""
        self._forecast.begin_admission()

    def admits(self, sequence: Sequence, batch: Batch) -> bool:
        """Whether preemption is not expected, or is cheap enough."""
        if self._never_full or not batch.running or self._rotation.is_next(sequence):
            return True
        if batch.step < self._full_until:
            return False
        others = [*batch.running, *batch.swap_ins]
        if self._forecast.has_room(others, sequence, self.cache):
            return True
        if self._recompute.is_worth(sequence, len(others), len(self.queue.sequences)):
            return True
        self._full_until = batch.step + _RETRY_STEPS
        return False

    def watermark(self, sequence: Sequence, batch: Batch) -> int:
        """Room for the next tokens of running sequences, which would be preempted at once."""
        if not batch.running or self._rotation.is_next(sequence):
            return 0
        return int(self.cache.num_blocks * _WATERMARK)

    def victim(self, batch: Batch) -> Sequence | None:
        """The running sequence that a preempted one replaces now, if any."""
        if self._never_full or batch.swap_ins:
            return None
        return self._rotation.victim(batch.running, self.queue.sequences, batch.step)

    def sequence_ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """The forecast takes the output's length into account."""
        self._full_until = 0
        if sequence.row >= 0:
            self._forecast.observe(sequence.num_output_tokens, reason is FinishReason.LENGTH)


POLICIES: dict[str, type[AdmissionPolicy]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}


def policy_of(config: SchedulerConfig) -> type[AdmissionPolicy]:
    """The policy that the configuration names: built in, or ``package.module.Class``.

    Raises:
        ConfigError: there is no such policy.
    """
    if config.is_static:
        return StaticBatch
    if config.policy in POLICIES:
        return POLICIES[config.policy]
    module, _, name = config.policy.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"scheduler policy {config.policy} cannot be imported: {error}. Name a class of a "
            f"module on PYTHONPATH, or one of {', '.join(POLICIES)}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, AdmissionPolicy)):
        raise ConfigError(
            f"scheduler policy {config.policy!r} is no AdmissionPolicy. Name a class derived "
            f"from it as package.module.Class, or one of {', '.join(POLICIES)}."
        )
    return found
