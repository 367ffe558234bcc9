"""Paused sequences take turns with running ones, where the host keeps what they computed."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import takewhile

from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import Sequence


class Pauses:
    """Counts them: now, and since the start."""

    __slots__ = ("num_sequences", "num_tokens", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_sequences = 0
        """Since the start; one that is paused twice counts twice."""
        self.num_tokens = 0
        """Of theirs, those that had to be computed again when they came back."""

    @classmethod
    def sum(cls, each: Iterable[Pauses]) -> Pauses:
        """Of several schedulers."""
        whole = cls()
        for pauses in each:
            for name in cls.__slots__:
                setattr(whole, name, getattr(whole, name) + getattr(pauses, name))
        return whole

    def begin(self, sequence: Sequence, step: int) -> None:
        """A sequence has lost its row and blocks."""
        self.num_waiting += 1
        self.num_sequences += 1
        sequence.pause(step)

    def end(self, sequence: Sequence) -> None:
        """One that may have been paused runs again, with what is left of its cache."""
        if sequence.is_preempted:
            self.num_tokens += len(sequence.token_ids) - 1 - sequence.num_computed_tokens
            self.over(sequence)

    def over(self, sequence: Sequence) -> None:
        """One that may have been paused does not wait any more."""
        self.num_waiting -= sequence.is_preempted
        sequence.is_preempted = False


_OPERATIONS_PER_BYTE = {"cuda": 160.0, "cpu": 5.0}
"""What a device computes in 16 bit while it moves a byte: an H200 at 680 TFLOP/s and 4.25 TB/s,
two processor cores. Others differ by less than it takes to matter."""


def tokens_per_read(config: PretrainedConfig, device_type: str) -> float:
    """Tokens of prompts that take as long to compute as the weights take to be read once.

    A weight of 16 bit is two bytes and two operations for a token; of a mixture's experts all
    are read, and some compute.
    """
    width = {"float32": 2.0}.get(config.dtype, 1.0)
    return width * _OPERATIONS_PER_BYTE[device_type] * _weights_per_used(config)


def _weights_per_used(config: PretrainedConfig) -> float:
    """Weights of a layer with experts over those that one token uses."""
    if not config.num_experts:
        return 1.0
    heads = config.num_attention_heads + config.num_key_value_heads
    common = 2 * config.hidden_size * heads * config.head_size
    common += 3 * config.hidden_size * config.shared_expert_intermediate_size
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    used = common + config.num_experts_per_tok * expert
    return (common + config.num_experts * expert) / used


class RecomputePrice:
    """Weighs a row that is used now against the KV cache that is thrown away later.

    Until the blocks run out, a newcomer's tokens come in steps that others pay for. Later they
    would share steps with those who wait now, if that is fewer than run. Both sides count in
    reads of the weights, which is what a step of few rows costs.
    """

    def __init__(self, cache: KVCacheManager, tokens_per_read: float) -> None:
        """With 0 ``tokens_per_read`` nobody starts who will have to make room."""
        self._cache = cache
        self._tokens_per_read = tokens_per_read

    def pays(self, newcomer: Sequence, num_running: int, num_waiting: int) -> bool:
        """Whether one of ``num_waiting`` should start beside the running ones all the same."""
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


_TURN_STEPS = 32
"""Steps that a sequence stays paused at least, before another one makes room for it."""
_STEPS_BETWEEN = 2
"""From one turn to the next at least: so many blocks take a while to copy."""
_PATIENCE = 8
"""Steps until it is tried again, where nobody could make room."""


class Turns:
    """Chooses who makes room for the sequence that was paused first.

    It is one that has more output: so all of a batch end together, where else those who were
    paused would end alone, in steps that read all weights for few. A turn costs two copies
    beside the steps, and the tokens of a block that was not full.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._next: Sequence | None = None
        self._paused_at = 0
        self._not_before = 0

    def begin_step(
        self, running: List[Sequence], waiting: List[Sequence], step: int
    ) -> Sequence | None:
        """Who is to be paused before ``step`` is planned, if somebody waits for a turn."""
        if not self._cache.hosts or not waiting:
            return None
        first = waiting[0]
        if not first.is_preempted or first.num_pending:
            return None
        if step < max(first.paused_at + _TURN_STEPS, self._not_before):
            return None
        num_blocks = self._cache.blocks_for(len(first.token_ids) + 1)
        if self.is_next(first) and num_blocks <= self._cache.num_available:
            # Room was made; what it waits for is something else.
            return None
        maker = self._most_advanced(running, first)
        if maker is None or not self._has_host_room(waiting, maker):
            self._not_before = step + _PATIENCE
            return None
        self._next, self._paused_at = first, first.paused_at
        self._not_before = step + _STEPS_BETWEEN
        return maker

    def is_next(self, sequence: Sequence) -> bool:
        """Whether room was made for this one since it was paused."""
        return sequence is self._next and sequence.paused_at == self._paused_at

    def _most_advanced(self, running: List[Sequence], first: Sequence) -> Sequence | None:
        """Of no higher priority, with more output, and more to come than a turn."""
        best, most = None, first.num_output_tokens
        for sequence in running:
            count = sequence.num_output_tokens
            if count > most and (
                sequence.key[0] >= first.key[0]
                and sequence.max_len - len(sequence.token_ids) > _TURN_STEPS
                and sequence.is_alone
                and not sequence.blocks.num_left
            ):
                best, most = sequence, count
        return best

    def _has_host_room(self, waiting: List[Sequence], maker: Sequence) -> bool:
        """Whether the host can keep what this one computed beside all that is paused."""
        paused = [maker, *takewhile(lambda sequence: sequence.is_preempted, waiting)]
        blocks_for = self._cache.blocks_for
        needed = sum(blocks_for(len(sequence.token_ids)) for sequence in paused)
        return needed <= self._cache.hosts[0].num_slots
