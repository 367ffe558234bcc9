"""Sequences that made room for others and wait to be computed again."""

from __future__ import annotations

from collections.abc import Iterable

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
