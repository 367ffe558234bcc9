"""Sequences that wait until the host's copy of their prefix is on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import RequestStatus, Sequence


class Releases:
    """Frees blocks, at once where it can."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._done_step = 0
        self._waiting: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        """Sequences whose blocks a step in flight still writes."""
        return iter(self._waiting)

    def release(self, sequence: Sequence) -> None:
        """Free the blocks now."""
        if sequence.beams is not None:
            self._cache.release(sequence.blocks)
            sequence.beams.release(self._cache)
            return
        self._cache.end(
            sequence.blocks,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            sequence.num_computed_tokens,
        )

    def pause(self, sequence: Sequence) -> None:
        """Free the blocks of one that makes room; the host may keep what is its own."""
        if sequence.is_alone:
            self._cache.keep(sequence.blocks, sequence.num_computed_tokens)
        self.release(sequence)

    def release_later(self, sequence: Sequence) -> None:
        """Free the blocks when the last step that computes tokens of it is done."""
        if sequence.last_step > self._done_step:
            self._waiting.append(sequence)
        else:
            self._cache.forget(sequence.blocks)
            self.release(sequence)

    def step_done(self, step: int) -> None:
        """This step writes no more."""
        self._done_step = step
        for _ in range(len(self._waiting)):
            self.release_later(self._waiting.popleft())


class Rows:
    """Hands rows out and takes them back; a sequence with beams takes one a beam."""

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows - 1, -1, -1))
        """The next one to be handed out last."""
        self._finished: list[int] = []

    def take(self, sequence: Sequence) -> None:
        """Give a sequence its rows; there are enough."""
        sequence.row = self.free.pop()
        if sequence.beams is not None:
            sequence.beams.enter_rows(self.free)

    def give_back(self, sequence: Sequence) -> None:
        """Take rows back that no decision has named yet."""
        self._give_back(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take rows back; the next decision tells every rank."""
        self._finished += self._give_back(sequence)

    def take_finished(self) -> list[int]:
        """The rows that were left, once each."""
        finished, self._finished = self._finished, []
        return finished

    def _give_back(self, sequence: Sequence) -> list[int]:
        rows = [sequence.row]
        sequence.row = -1
        if sequence.beams is not None:
            rows += sequence.beams.leave_rows()
        self.free += rows
        return rows


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
