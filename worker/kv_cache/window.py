"""How far back the queries of a model's layers see, in blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """The last so many tokens and the blocks of the first ones, its sinks.

    Blocks behind the sinks that no query sees any more stay in a sequence's tables, which
    are read by position, but are held no longer: ``num_left`` counts them.
    """

    num_tokens: int
    """0 where some layer sees everything."""

    num_sinks: int
    """Blocks that are seen from everywhere."""

    block_size: int

    def num_unseen(self, position: int) -> int:
        """Blocks behind the sinks that no query from this position on sees."""
        return max(0, (position - self.num_tokens + 1) // self.block_size - self.num_sinks)

    def left(self, num_left: int) -> range:
        """The places in a table of the ``num_left`` blocks that are held no more."""
        return range(self.num_sinks, self.num_sinks + num_left)

    def held(self, table: list[int], num_left: int) -> list[int]:
        """The blocks of a table that are held."""
        if not num_left:
            return table
        left = self.left(num_left)
        return table[: left.start] + table[left.stop :]
