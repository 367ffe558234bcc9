"""What sequences hold on the device: rows, blocks in use by steps in flight, and swap-ins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimaran.worker.kv_cache.manager import KVCacheManager
from trimaran.worker.requests.request import RequestStatus, Sequence


class Rows:
    """The rows of the device's batch. A sequence with beams takes one row per beam."""

    def __init__(self, num_rows: int) -> None:
        self.free = list(range(num_rows - 1, -1, -1))
        """The row that is handed out next stands last."""
        self._finished: list[int] = []

    def take(self, sequence: Sequence) -> None:
        """Give a sequence its rows; the caller has checked that there are enough."""
        sequence.row = self.free.pop()
        if sequence.beams is not None:
            sequence.beams.enter_rows(self.free)

    def give_back(self, sequence: Sequence) -> None:
        """Take rows back that no decision has named yet."""
        self._give_back(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take rows back; the next decision names them to every rank."""
        self._finished += self._give_back(sequence)

    def take_finished(self) -> list[int]:
        """The rows that were left since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def _give_back(self, sequence: Sequence) -> list[int]:
        rows = [sequence.row]
        sequence.row = -1
        if sequence.beams is not None:
            rows += sequence.beams.leave_rows()
        self.free += rows
        return rows


class DeferredFrees:
    """Frees the blocks of sequences that left their rows.

    Blocks of a finished sequence are freed once no step in flight writes them. Blocks of a
    preempted sequence are freed at once: ranks run steps in order, so a later owner of these
    blocks writes them after the step in flight.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._done_step = 0
        self._waiting: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        """Sequences whose blocks a step in flight still writes."""
        return iter(self._waiting)

    def preempt(self, sequence: Sequence) -> None:
        """Free a preempted sequence's blocks; the host cache may keep its own content."""
        if sequence.is_alone:
            self._cache.keep(sequence.blocks, sequence.num_computed_tokens)
        self._free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Free a finished sequence's blocks when its last step is done."""
        if sequence.last_step > self._done_step:
            self._waiting.append(sequence)
        else:
            self._cache.forget(sequence.blocks)
            self._free(sequence)

    def step_done(self, step: int) -> None:
        """The result of ``step`` is here, so it writes no more."""
        self._done_step = step
        for _ in range(len(self._waiting)):
            self.free(self._waiting.popleft())

    def _free(self, sequence: Sequence) -> None:
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


class SwapIns:
    """Sequences with a row and blocks, whose prefix is being copied from the host cache.

    They join no step before their copies are made, so no other sequence waits for these.
    Copies begin in order of steps, and end in that order.
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
    def num_unfinished(self) -> int:
        """Sequences that were not cancelled meanwhile."""
        return sum(sequence.status is not RequestStatus.FINISHED for sequence in self)

    def add(self, sequence: Sequence, step: int) -> None:
        """The copies for ``sequence`` begin with this step."""
        self._under_way.append((step, sequence))

    def take(self, cache: KVCacheManager, *, is_urgent: bool) -> Sequence | None:
        """A sequence whose copies are made; None if there is none. The sequence may have ended.

        With ``is_urgent`` the first sequence is taken in any case: the device waits for its
        copies.
        """
        if not self._under_way:
            return None
        if self._under_way[0][0] > self.done_step and not is_urgent:
            return None
        # The next step waits even if the copies are made here, or if the sequence has ended:
        # another rank may still be copying.
        self._wait_step, sequence = self._under_way.popleft()
        cache.loaded(sequence.blocks)
        return sequence

    def take_wait_step(self) -> int:
        """The last step whose copies the next step builds on, once; 0 for none."""
        step, self._wait_step = self._wait_step, 0
        return step
