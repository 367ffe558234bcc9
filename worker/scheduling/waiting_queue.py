"""The sequences that wait for a row and blocks, in order of priority and arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as List

from trimaran.comm.errors import RefusedError, with_request_id
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.requests.request import (
    KEY,
    Request,
    RequestStatus,
    Sequence,
    remove_by_key,
)
from trimaran.worker.scheduling.preemption import PreemptionCounts


class WaitingQueue:
    """Ordered by `Sequence.key`; preempted sequences stand before others of their priority.

    Inserting is a binary search and a move of the sequences behind. Finding the next sequence
    looks at each adapter that is being loaded, not at each sequence that waits for it.
    """

    def __init__(self, cache: KVCacheManager, adapters: AdapterManager | None) -> None:
        self.sequences: list[Sequence] = []
        """In order; for reading."""

        self.expected: set[Request] = set()
        """Checked requests whose sequences come later. They count as waiting already."""

        self.preemptions = PreemptionCounts()
        self._cache = cache
        self._adapters = adapters
        self._held: dict[int, list[Sequence]] = {}
        """By adapter number and in order, the sequences whose adapter is being loaded."""

        self._ready: list[Sequence] = []
        """In order, all others, if the engine has adapters."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._cache.start_hashes(
            sequence.blocks, sequence.token_ids, sequence.num_prompt_tokens
        )
        self._insert(sequence)

    def add_preempted(self, sequence: Sequence, step: int) -> None:
        """Queue a sequence that ran until this step."""
        self.preemptions.preempted()
        sequence.preempt(step)
        self._insert(sequence)

    def next(self, *, may_overtake: bool) -> Sequence | None:
        """The first sequence that may start; None if all wait for adapters or masks.

        With ``may_overtake`` sequences may start before one that waits for its adapter: the
        adapter arrives soon, whether they run or not.
        """
        if self._adapters is None or not may_overtake:
            return _first(self.sequences)
        # Thousands of sequences may wait for one adapter: they are sorted in once it is there.
        for number in [each for each in self._held if self._adapters.is_ready(each)]:
            self._ready = sorted([*self._ready, *self._held.pop(number)], key=KEY)
        return _first(self._ready)

    @property
    def ready(self) -> list[Sequence]:
        """In order, sequences whose adapter was there when `next` looked; for reading."""
        return self.sequences if self._adapters is None else self._ready

    def start(self, sequence: Sequence) -> None:
        """The sequence has a row and blocks and waits no more."""
        self._remove(sequence)
        self.preemptions.resumed(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence ended while it waited."""
        self._remove(sequence)
        self.preemptions.left(sequence)
        self._cache.forget(sequence.blocks)

    def _insert(self, sequence: Sequence) -> None:
        sequence.status = RequestStatus.WAITING
        insort(self.sequences, sequence, key=KEY)
        number = sequence.request.adapter_id
        if self._adapters is not None:
            is_held = number in self._held or not self._adapters.is_ready(number)
            line = self._held.setdefault(number, []) if is_held else self._ready
            insort(line, sequence, key=KEY)

    def _remove(self, sequence: Sequence) -> None:
        remove_by_key(self.sequences, sequence)
        number = sequence.request.adapter_id
        if self._adapters is not None:
            remove_by_key(self._held.get(number, self._ready), sequence)
            if not self._held.get(number, True):
                del self._held[number]


def _first(sequences: List[Sequence]) -> Sequence | None:
    """The first that is not without the mask of its guide, as a preempted one may be."""
    for sequence in sequences:
        if sequence.guide is None or sequence.guide.mask is not None:
            return sequence
    return None


def check_queue(
    request: Request, config: SchedulerConfig, queues: List[WaitingQueue], num_free_rows: int
) -> None:
    """Refuse a request if the queue of its priority is full.

    ``queues`` are those of all data-parallel ranks. Sequences that will get one of the free
    rows do not count as waiting. A replayed request is never refused. The cost is a binary
    search per queue.

    Raises:
        RefusedError: as many requests wait as may.
    """
    level, levels = -request.priority, config.level_queue_sizes
    limit = levels[level - 1] if levels else config.max_queue_size
    if not limit or request.output_ids:
        return
    first, end = 0, sum(len(queue.sequences) + len(queue.expected) for queue in queues)
    if levels:
        first, end = (
            sum(
                bisect_left(queue.sequences, (bound,), key=KEY)
                + sum(-other.priority < bound for other in queue.expected)
                for queue in queues
            )
            for bound in (level, level + 1)
        )
    if end - max(first, num_free_rows) < limit:
        return
    place = f" by priority level {level}" if levels else ""
    text = (
        f"Exceeds maximum queue size: Maximum queue size of {limit} has been reached{place}, "
        "please try again later"
    )
    raise RefusedError(with_request_id(request.client_id, text))
