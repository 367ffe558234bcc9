"""Sequences that wait until the host's copy of their prefix is on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import RequestStatus, Sequence


class Loads:
    """Sequences that have a row and blocks, and whose blocks are being copied from the host.

    They are no part of a step until then, so that nobody waits for their copies. Copies are
    begun in order of steps and end in it.
    """

    def __init__(self) -> None:
        self.done_step = 0
        """The copies of all steps up to this one are made."""
        self._under_way: deque[tuple[int, Sequence]] = deque()
        self._wait_step = 0

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._under_way)

    @property
    def num_open(self) -> int:
        """Those that have not ended meanwhile."""
        return sum(sequence.status is not RequestStatus.FINISHED for sequence in self)

    def add(self, sequence: Sequence, step: int) -> None:
        """The copies for ``sequence`` begin with this step."""
        self._under_way.append((step, sequence))

    def take(self, cache: KVCacheManager, *, is_urgent: bool) -> Sequence | None:
        """A sequence whose copies are made; None if there is none. It may have ended.

        If it ``is_urgent`` the first one is taken even so: the device waits for its copies.
        """
        if not self._under_way:
            return None
        if self._under_way[0][0] > self.done_step and not is_urgent:
            return None
        # Waited for even if they are made, or it has ended: those of other ranks may not be.
        self._wait_step, sequence = self._under_way.popleft()
        cache.loaded(sequence.blocks)
        return sequence

    def take_wait_step(self) -> int:
        """The last step whose copies the next step builds on, once; 0 if it builds on none."""
        step, self._wait_step = self._wait_step, 0
        return step
