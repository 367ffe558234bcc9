"""Whether admission may go on: who starts now should end before others must make room."""

from __future__ import annotations

from collections.abc import Sequence as List

from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence
from trimaran.worker.scheduling.kv_forecast import GrowthForecast
from trimaran.worker.scheduling.preemption import RecomputePrice, Turns
from trimaran.worker.scheduling.resources import Loads

_PATIENCE = 16
"""Steps until admission is tried again, unless a sequence ends before."""


class Outlook:
    """Asks the forecast of growth where it matters, and not again in every step."""

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        self._cache = cache
        self._is_certain = not config.can_preempt or cache.holds(
            config.max_num_seqs, config.max_seq_len
        )
        self._growth = GrowthForecast(config.expected_output_tokens)
        self._turns = Turns(cache)
        self._price = RecomputePrice(cache, config.tokens_per_read)
        self._full_until = 0
        """The step before which no room is expected for another sequence."""

    def beams_came(self) -> None:
        """From now on there may be sequences with beams."""
        self._growth.has_beams = True

    def ended(self, sequence: Sequence, reason: FinishReason) -> None:
        """A sequence has ended, and leaves its place if it ran."""
        self._full_until = 0
        if sequence.row >= 0:
            self._growth.observe(sequence.num_output_tokens, reason is FinishReason.LENGTH)

    def who_makes_room(
        self, running: List[Sequence], waiting: List[Sequence], loads: Loads, step: int
    ) -> Sequence | None:
        """Who is to be paused before ``step`` is planned, for one that has been for long."""
        if self._is_certain or loads:
            return None
        return self._turns.begin_step(running, waiting, step)

    def begin_admission(self) -> None:
        """Ask about newcomers one by one from now on, with nothing else in between."""
        self._growth.begin_admission()

    def has_turn(self, newcomer: Sequence) -> bool:
        """Whether another one made room for it."""
        return self._turns.is_next(newcomer)

    def has_future(
        self,
        newcomer: Sequence,
        running: List[Sequence],
        loads: Loads,
        num_waiting: int,
        step: int,
    ) -> bool:
        """Whether a newcomer can be expected to end before anybody must be preempted, or is
        worth that.

        ``num_waiting`` counts it too.
        """
        if self._is_certain or not running or self.has_turn(newcomer):
            return True
        if step < self._full_until:
            return False
        others = [*running, *loads]
        if self._growth.has_room(others, newcomer, self._cache):
            return True
        if self._price.pays(newcomer, len(others), num_waiting):
            return True
        self._full_until = step + _PATIENCE
        return False
