"""The rows on the device: which are free, and which have lost their occupant."""

from __future__ import annotations

from trimaran.worker.requests.request import Sequence


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
