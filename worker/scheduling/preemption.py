"""Preempted sequences: their number, the order in which they resume, the cost of recompute."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import takewhile

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence

_MIN_PREEMPTED_STEPS = 32
"""Least steps of a sequence in preemption before another sequence is preempted for it."""
_MIN_STEPS_BETWEEN = 2
"""Least steps between two such preemptions: copying so many blocks takes a while."""
_RETRY_STEPS = 8
"""Steps until the next attempt, if no running sequence could be preempted."""

_OPERATIONS_PER_BYTE = {"cuda": 160.0, "cpu": 5.0}
"""16-bit operations that a device computes in the time of moving one byte: an H200 with 680
TFLOP/s and 4.25 TB/s, and two CPU cores. Other devices differ by less than matters here."""


class PreemptionCounts:
    """Counts preempted sequences: those that wait now, and all since the start."""

    __slots__ = ("num_sequences", "num_tokens", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_sequences = 0
        """Since the start; a sequence that is preempted twice counts twice."""
        self.num_tokens = 0
        """Tokens of these sequences that had to be computed again after they resumed."""

    @classmethod
    def sum(cls, each: Iterable[PreemptionCounts]) -> PreemptionCounts:
        """The counts of several schedulers, added."""
        whole = cls()
        for counts in each:
            for name in cls.__slots__:
                setattr(whole, name, getattr(whole, name) + getattr(counts, name))
        return whole

    def preempted(self) -> None:
        """Count a sequence that has lost its row and blocks."""
        self.num_waiting += 1
        self.num_sequences += 1

    def resumed(self, sequence: Sequence) -> None:
        """Count a sequence that runs again, if it was preempted before.

        Its computed tokens are those that the prefix cache or the host cache kept.
        """
        if sequence.is_preempted:
            self.num_tokens += len(sequence.token_ids) - 1 - sequence.num_computed_tokens
            self.left(sequence)

    def left(self, sequence: Sequence) -> None:
        """The sequence does not wait any more, for whatever reason."""
        self.num_waiting -= sequence.is_preempted
        sequence.is_preempted = False


class ResumeRotation:
    """Preempts a running sequence for a sequence that was preempted long ago.

    The victim has more output than the sequence that resumes, so that all sequences of a batch
    end at about the same time. Without rotation the preempted sequences would run alone at the
    end, in steps that read all weights for few rows. A rotation costs two copies, which run
    beside the steps, and recomputes the tokens of one partial block. Rotation needs a host
    cache: without the copies a rotation would recompute whole sequences.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._next: Sequence | None = None
        self._preempted_at = 0
        self._not_before = 0

    def victim(
        self, running: List[Sequence], waiting: List[Sequence], step: int
    ) -> Sequence | None:
        """The sequence to preempt before ``step`` is planned; None for none."""
        if not self._cache.hosts or not waiting:
            return None
        first = waiting[0]
        if not first.is_preempted or first.num_pending:
            return None
        if step < max(first.preempted_at + _MIN_PREEMPTED_STEPS, self._not_before):
            return None
        num_blocks = self._cache.blocks_for(len(first.token_ids) + 1)
        if self.is_next(first) and num_blocks <= self._cache.num_available:
            # Its room is there; it waits for something else.
            return None
        victim = self._most_advanced(running, first)
        if victim is None or not self._has_host_room(waiting, victim):
            self._not_before = step + _RETRY_STEPS
            return None
        self._next, self._preempted_at = first, first.preempted_at
        self._not_before = step + _MIN_STEPS_BETWEEN
        return victim

    def is_next(self, sequence: Sequence) -> bool:
        """Whether a victim was preempted for this sequence since it was preempted itself."""
        return sequence is self._next and sequence.preempted_at == self._preempted_at

    def _most_advanced(self, running: List[Sequence], first: Sequence) -> Sequence | None:
        """The running sequence with the most output, and with more output than ``first``.

        The sequence's priority is not higher than that of ``first``, and its remaining tokens
        exceed `_MIN_PREEMPTED_STEPS`.
        """
        best, most = None, first.num_output_tokens
        for sequence in running:
            count = sequence.num_output_tokens
            if count > most and (
                sequence.key[0] >= first.key[0]
                and sequence.max_len - len(sequence.token_ids) > _MIN_PREEMPTED_STEPS
                and sequence.is_alone
                and not sequence.blocks.num_skipped
            ):
                best, most = sequence, count
        return best

    def _has_host_room(self, waiting: List[Sequence], victim: Sequence) -> bool:
        """Whether the host cache holds the victim's blocks beside all preempted sequences'."""
        preempted = [victim, *takewhile(lambda sequence: sequence.is_preempted, waiting)]
        blocks_for = self._cache.blocks_for
        needed = sum(blocks_for(len(sequence.token_ids)) for sequence in preempted)
        return needed <= self._cache.hosts[0].num_slots


class RecomputeCost:
    """Weighs a row that is used now against the KV cache that preemption discards later.

    Until the blocks run out, the newcomer's tokens join steps that run anyway. If it waited,
    its tokens would later share steps with the other waiting sequences, if those are fewer than
    the running ones. Both sides count in reads of the weights: a step of few rows costs one.
    """

    def __init__(self, cache: KVCacheManager, tokens_per_read: float) -> None:
        """With 0 ``tokens_per_read`` no sequence starts that must be preempted later."""
        self._cache = cache
        self._tokens_per_read = tokens_per_read

    def is_worth(self, newcomer: Sequence, num_running: int, num_waiting: int) -> bool:
        """Whether ``newcomer``, one of ``num_waiting``, should start although it will probably
        be preempted, or cause a preemption."""
        if newcomer.beams is not None:
            return False
        num_known = len(newcomer.token_ids)
        num_rows = num_running + 1
        room = self._cache.num_available * self._cache.block_size - num_known
        num_steps = min(room / num_rows, newcomer.max_len - num_known)
        if num_steps <= 0:
            return False
        num_saved = num_steps / max(1, min(num_rows, num_waiting))
        return num_saved * self._tokens_per_read > num_known + num_steps


def tokens_per_read(config: PretrainedConfig, device_type: str) -> float:
    """Prompt tokens that take as long to compute as the weights take to be read once.

    A 16-bit weight is two bytes, and two operations per token. All experts of a mixture are
    read, and only the chosen ones compute.
    """
    width = {"float32": 2.0}.get(config.dtype, 1.0)
    return width * _OPERATIONS_PER_BYTE[device_type] * _weights_per_used(config)


def _weights_per_used(config: PretrainedConfig) -> float:
    """Weights of a layer with experts over the weights that one token uses."""
    if not config.num_experts:
        return 1.0
    heads = config.num_attention_heads + config.num_key_value_heads
    common = 2 * config.hidden_size * heads * config.head_size
    common += 3 * config.hidden_size * config.shared_expert_intermediate_size
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    used = common + config.num_experts_per_tok * expert
    return (common + config.num_experts * expert) / used
