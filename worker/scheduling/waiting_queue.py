"""The sequences that wait for a row and blocks, the most urgent first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.lora.manager import AdapterManager
from trimaran.worker.requests.request import (
    KEY,
    Request,
    RequestStatus,
    Sequence,
    remove_by_key,
)
from trimaran.worker.scheduling.preemption import Pauses


class WaitingQueue:
    """In order of priority and arrival; who was paused stands before the others of its level.

    Finding a place is a binary search, making room there a move of those behind it. Finding who
    is next looks at each adapter that is on its way, not at those that wait for it.
    """

    def __init__(self, cache: KVCacheManager, adapters: AdapterManager | None) -> None:
        self.sequences: list[Sequence] = []
        """In order; for reading."""

        self.expected: set[Request] = set()
        """Checked requests whose sequences come later: they have their places already."""

        self.pauses = Pauses()
        self._cache = cache
        self._adapters = adapters
        self._held: dict[int, list[Sequence]] = {}
        """In order, those whose adapter is on its way, by its number."""

        self._ready: list[Sequence] = []
        """In order, all others, if the engine has adapters."""

    def add(self, sequence: Sequence) -> None:
        """A new one waits from now on."""
        self._cache.extend_hashes(sequence.blocks, sequence.token_ids)
        self._insert(sequence)

    def add_forks(self, parents: Iterable[Sequence]) -> None:
        """The siblings of sequences whose prompt is computed wait from now on."""
        for parent in parents:
            for sibling in parent.request.sequences[1:]:
                if sibling.status is RequestStatus.NEW:
                    self.add(sibling)

    def add_paused(self, sequence: Sequence, step: int) -> None:
        """One that ran until this step waits again."""
        self.pauses.begin(sequence, step)
        self._insert(sequence)

    def next(self, *, may_overtake: bool) -> Sequence | None:
        """Who is to start next; None if all wait for adapters that are on their way.

        If others ``may_overtake``, who waits for an adapter holds up nobody: it is there
        soon, whatever they do.
        """
        if self._adapters is None or not may_overtake:
            return self.sequences[0]
        # Thousands may wait for one adapter: who waits for it is looked at when it is there.
        for number in [each for each in self._held if self._adapters.is_ready(each)]:
            self._ready = sorted([*self._ready, *self._held.pop(number)], key=KEY)
        return self._ready[0] if self._ready else None

    @property
    def ready(self) -> list[Sequence]:
        """In order, those whose adapter was not on its way when `next` looked; for reading."""
        return self.sequences if self._adapters is None else self._ready

    def start(self, sequence: Sequence) -> None:
        """One has a place and waits no more."""
        self._remove(sequence)
        self.pauses.end(sequence)

    def drop(self, sequence: Sequence) -> None:
        """One has ended where it waits."""
        self._remove(sequence)
        self.pauses.over(sequence)
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
