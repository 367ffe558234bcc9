"""How heads and inner widths are shared out over the ranks of a tensor group; no torch."""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT = 8
"""Elements: where a width is not shared out evenly, rows of 16-bit numbers still begin where
a GPU reads them in wide words."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of a dimension.

    Every rank has room for ``size`` elements. The first ``count`` of them are those from
    ``first`` on of the ``whole``; the others are zeros, which add nothing to any sum.
    """

    whole: int
    first: int
    count: int
    size: int

    def times(self, factor: int) -> Share:
        """The same share of a dimension in which each element is ``factor`` long."""
        numbers = (self.whole, self.first, self.count, self.size)
        return Share(*(number * factor for number in numbers))


def even_share(whole: int, rank: int, num_ranks: int, alignment: int = _ALIGNMENT) -> Share:
    """As much for each rank; if ``num_ranks`` do not divide the whole, a multiple of
    ``alignment``, of which the last ranks have less."""
    size = -(-whole // num_ranks)
    if whole % num_ranks:
        size = -(-size // alignment) * alignment
    return _contiguous(whole, rank, size)


@dataclass(frozen=True, slots=True)
class HeadShares:
    """A rank's query heads, and the key-value heads that these attend to.

    The first query heads attend to the first key-value head, as many to each of them.
    """

    queries: Share
    keys: Share


def head_shares(
    num_heads: int, num_kv_heads: int, rank: int = 0, num_ranks: int = 1
) -> HeadShares:
    """Share heads out, so that a rank has as few key-value heads as can be, then queries.

    With more ranks than key-value heads, several ranks have a copy of one and a part of its
    query heads each. Else each has whole groups: a key-value head and its query heads.
    """
    group = num_heads // num_kv_heads
    kv_size = -(-num_kv_heads // num_ranks)
    most_copies = min(group, kv_size * num_ranks // num_kv_heads)
    # Of as short parts the fewest, which leaves fewer of them empty.
    copies = min(range(1, most_copies + 1), key=lambda count: (-(-group // count), count))
    if copies == 1:
        keys = _contiguous(num_kv_heads, rank, kv_size)
        return HeadShares(queries=keys.times(group), keys=keys)
    # Here a rank has one key-value head at most.
    number, part = divmod(rank, copies)
    if number >= num_kv_heads:
        number, part = num_kv_heads, 0
    size = -(-group // copies)
    ours = _contiguous(group, part, size)
    count = ours.count if number < num_kv_heads else 0
    queries = Share(num_heads, number * group + ours.first, count, size)
    return HeadShares(queries, Share(num_kv_heads, number, min(count, 1), 1))


def _contiguous(whole: int, rank: int, size: int) -> Share:
    """The ``rank``th part of ``size`` elements, or what there is of it."""
    first = min(rank * size, whole)
    return Share(whole, first, min(size, whole - first), size)
