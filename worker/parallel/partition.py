"""Tensor-parallel partitioning of heads and inner widths; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT = 8
"""Sizes of uneven partitions are multiples of this many elements, so that rows of 16-bit
values stay aligned for a GPU's wide loads."""


@dataclass(frozen=True, slots=True)
class DimPartition:
    """A rank's part of a dimension.

    Every rank has room for ``size`` elements. The first ``count`` hold elements ``first`` to
    ``first + count`` of the ``whole``. The rest is zero padding, which adds nothing to a sum.
    """

    whole: int
    first: int
    count: int
    size: int

    def times(self, factor: int) -> DimPartition:
        """The same partition of a dimension with ``factor`` times as many elements."""
        numbers = (self.whole, self.first, self.count, self.size)
        return DimPartition(*(number * factor for number in numbers))


def even_partition(
    whole: int, rank: int, num_ranks: int, alignment: int = _ALIGNMENT, multiple: int = 1
) -> DimPartition:
    """Equal sizes for all ranks. If ``num_ranks`` does not divide the whole, the size is a
    multiple of ``alignment`` and the last ranks hold fewer elements.

    With several ranks the size is also a multiple of ``multiple``, whatever the whole.
    """
    size = -(-whole // num_ranks)
    if whole % num_ranks:
        size = -(-size // alignment) * alignment
    if num_ranks > 1:
        size = -(-size // multiple) * multiple
    return _contiguous(whole, rank, size)


@dataclass(frozen=True, slots=True)
class HeadPartition:
    """A rank's query heads and the key-value heads that they attend to.

    Every key-value head serves equally many query heads, in ascending order.
    """

    queries: DimPartition
    keys: DimPartition


def partition_heads(
    num_heads: int, num_kv_heads: int, rank: int = 0, num_ranks: int = 1
) -> HeadPartition:
    """Partition heads with the fewest key-value heads a rank, then the fewest query heads.

    With more ranks than key-value heads, several ranks replicate a key-value head and split
    its query heads. Otherwise each rank has whole groups: a key-value head and its queries.
    """
    group = num_heads // num_kv_heads
    kv_size = -(-num_kv_heads // num_ranks)
    max_copies = min(group, kv_size * num_ranks // num_kv_heads)
    # Among parts of equal length prefer the fewest copies, which leave fewer parts empty.
    copies = min(range(1, max_copies + 1), key=lambda count: (-(-group // count), count))
    if copies == 1:
        keys = _contiguous(num_kv_heads, rank, kv_size)
        return HeadPartition(queries=keys.times(group), keys=keys)
    # Each rank has at most one key-value head here.
    number, part = divmod(rank, copies)
    if number >= num_kv_heads:
        number, part = num_kv_heads, 0
    size = -(-group // copies)
    ours = _contiguous(group, part, size)
    count = ours.count if number < num_kv_heads else 0
    queries = DimPartition(num_heads, number * group + ours.first, count, size)
    return HeadPartition(queries, DimPartition(num_kv_heads, number, min(count, 1), 1))


def _contiguous(whole: int, rank: int, size: int) -> DimPartition:
    """Part ``rank`` of ``size`` elements, cut at the end of the whole."""
    first = min(rank * size, whole)
    return DimPartition(whole, first, min(size, whole - first), size)
