"""First-fit allocation of one buffer to adapters of many sizes."""

from __future__ import annotations


class CacheAllocator:
    """Allocates contiguous ranges, first fit; sizes are elements, not bytes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: list[tuple[int, int]] = []
        """(first, size) of the allocated ranges, ascending."""

    @property
    def num_used(self) -> int:
        """Allocated elements."""
        return sum(size for _, size in self._used)

    def take(self, size: int) -> int | None:
        """The first element of a new range of this size; None if no gap holds it."""
        first = 0
        for index, (used, length) in enumerate(self._used):
            if used - first >= size:
                self._used.insert(index, (first, size))
                return first
            first = used + length
        if self.size - first < size:
            return None
        self._used.append((first, size))
        return first

    def give_back(self, first: int) -> None:
        """Free the range that begins at ``first``."""
        self._used = [extent for extent in self._used if extent[0] != first]
