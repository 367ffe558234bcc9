"""Which bytes of an exchange between all ranks go where, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate


class Shares:
    """The exchange as one rank sees it.

    Each rank shows what it sends to others as one row of bytes, in order of the ranks; a
    window is a part of that row, at the same place in all ranks' rows. What a rank sends to
    itself is in none.
    """

    def __init__(self, table: Sequence[Sequence[int]], rank: int) -> None:
        """``table[i][j]`` bytes go from rank i to rank j."""
        self._table = table
        self._rank = rank
        ranks = range(len(table))
        shown = [[0 if i == j else table[i][j] for j in ranks] for i in ranks]
        self._shown_at = [[0, *accumulate(row)] for row in shown]
        self._held_at = [0, *accumulate(table[rank])]
        self._taken_at = [0, *accumulate(row[rank] for row in table)]
        self.longest = max(starts[-1] for starts in self._shown_at)
        """Bytes of the longest row shown."""

    @property
    def kept(self) -> tuple[int, int, int]:
        """What a rank sends to itself: where it is, where it goes, its size."""
        rank = self._rank
        return self._held_at[rank], self._taken_at[rank], self._table[rank][rank]

    def sent(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Of each piece that this rank shows in a window: where it is, its place in the
        window, its size."""
        for other in range(len(self._table)):
            found = self._overlap(self._rank, other, start, length)
            if found is not None:
                offset, place, size = found
                yield self._held_at[other] + offset, place, size

    def received(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Of each piece for this rank in a window: whose it is, its place in the window,
        where it goes, its size."""
        for other in range(len(self._table)):
            found = self._overlap(other, self._rank, start, length)
            if found is not None:
                offset, place, size = found
                yield other, place, self._taken_at[other] + offset, size

    def _overlap(
        self, source: int, target: int, start: int, length: int
    ) -> tuple[int, int, int] | None:
        """Of what ``source`` shows ``target`` in a window: offset in it, place, size."""
        if source == target:
            return None
        first, end = self._shown_at[source][target : target + 2]
        begin = max(first, start)
        size = min(end, start + length) - begin
        return (begin - first, begin - start, size) if size > 0 else None
