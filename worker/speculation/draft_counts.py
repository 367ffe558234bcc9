"""Counts of drafts, for metrics."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.comm.messages.messages import DRAFT_POSITION_KEYS


class DraftCounts:
    """Drafts since the start: sequences' drafts, their tokens, and accepted tokens by
    position."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self.num_accepted = 0
        """Accepted draft tokens."""
        self._num_by_length = [0] * (len(DRAFT_POSITION_KEYS) + 1)
        """Drafts by their number of accepted tokens; the last entry counts all longer ones."""

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Count one sequence's draft of one step."""
        self.num_drafts += 1
        self.num_tokens += num_tokens
        self.num_accepted += num_accepted
        by_length = self._num_by_length
        by_length[min(num_accepted, len(by_length) - 1)] += 1

    @classmethod
    def sum(cls, each: Iterable[DraftCounts]) -> DraftCounts:
        """All of them together."""
        total = cls()
        for counts in each:
            total.num_drafts += counts.num_drafts
            total.num_tokens += counts.num_tokens
            total.num_accepted += counts.num_accepted
            pairs = zip(total._num_by_length, counts._num_by_length, strict=True)
            total._num_by_length = [a + b for a, b in pairs]
        return total

    @property
    def accepted_at(self) -> list[int]:
        """Accepted tokens by their position in a draft; the last entry counts all later
        positions."""
        lengths = self._num_by_length
        counts = [sum(lengths[position + 1 :]) for position in range(len(lengths) - 1)]
        counts[-1] += self.num_accepted - sum(counts)
        return counts

    def values(self) -> dict[str, float]:
        """The counts by key of ``STATS_KEYS``."""
        accepted = dict(zip(DRAFT_POSITION_KEYS, self.accepted_at, strict=True))
        return {"num_drafts": self.num_drafts, "num_draft_tokens": self.num_tokens, **accepted}
