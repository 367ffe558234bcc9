"""Unreferenced blocks in eviction order."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

DEFAULT_PRIORITY = 35
"""The default priority of retention; priorities are 0 to 100."""

_FEW_ENDS = 1024
"""Outdated entries of `_ends` up to this number are not removed."""

_LEEWAY = 8
"""A block of the wanted partition is evicted before an older block of the other partition,
unless more than one in so many of all blocks was freed between the two. A prefix that many
requests share lies in one partition; without this limit, their blocks would keep to half of the
memory."""


class Retention(NamedTuple):
    """Retention of content that no sequence uses."""

    priority: int = DEFAULT_PRIORITY
    """Content of higher priority is evicted later."""

    duration_s: float = 0.0
    """Seconds until the default priority holds again; 0 means never."""


class _Queue:
    """Blocks in order of arrival, a queue for each L2 partition."""

    def __init__(self, partitions: bytes) -> None:
        self._partitions = partitions
        self._of_partition: tuple[OrderedDict[int, int], ...] = (OrderedDict(), OrderedDict())
        """Each block with the number of blocks that were added before it."""
        self._num_come = 0

    def __len__(self) -> int:
        return len(self._of_partition[0]) + len(self._of_partition[1])

    def __contains__(self, block: int) -> bool:
        return block in self._of_partition[self._partitions[block]]

    def __iter__(self) -> Iterator[int]:
        return chain(*self._of_partition)

    def add(self, block: int) -> None:
        self._of_partition[self._partitions[block]][block] = self._num_come
        self._num_come += 1

    def remove(self, block: int) -> None:
        del self._of_partition[self._partitions[block]][block]

    def pop(self, partition: int) -> int:
        """The oldest block of a partition; of the other partition if this partition is
        empty.
        """
        own = self._of_partition[partition] or self._of_partition[1 - partition]
        return own.popitem(last=False)[0]

    def pop_old(self, partition: int) -> int:
        """Like `pop`, but takes the other partition's oldest block if that block is much
        older.
        """
        own, other = self._of_partition[partition], self._of_partition[1 - partition]
        if own and other:
            lead = next(iter(own.values())) - next(iter(other.values()))
            partition = 1 - partition if lead > len(self._partitions) // _LEEWAY else partition
        return self.pop(partition)


class FreeBlocks:
    """Free blocks in order of eviction: blocks without content, partial blocks, then by
    priority, then by age. The requested partition has an advantage in the comparison of ages.

    A block's priority may be set at any time, and lasts until its content is dropped or its
    duration ends. Only priorities other than the default cost time.
    """

    def __init__(self, partitions: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """``partitions`` gives the L2 partition, 0 or 1, of every block."""
        self._clock = clock
        self._partitions = partitions
        self._blank, self._partial, self._usual = (_Queue(partitions) for _ in range(3))
        for block in range(len(partitions)):
            self._blank.add(block)
        self._num_of_partition = [partitions.count(0), partitions.count(1)]
        self._ranked: dict[int, _Queue] = {}
        """Free blocks with content, by a priority that is not the default."""
        self._num_ranked = 0
        self._kept: dict[int, tuple[int, int]] = {}
        """The other than default priority of blocks, free or not, and the number of the entry
        in `_ends`."""
        self._ends: list[tuple[float, int, int]] = []
        """Heap of (time, entry's number, block) at which priorities end. Up to about half of
        the entries may be outdated."""
        self._num_words = 0

    def __len__(self) -> int:
        num_usual = len(self._blank) + len(self._partial) + len(self._usual)
        return num_usual + self._num_ranked

    def __contains__(self, block: int) -> bool:
        return block in self._blank or self._has_free(block)

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self._partial
        yield from self._usual
        for queue in self._ranked.values():
            yield from queue

    @property
    def freer_partition(self) -> int:
        """The partition with the most free blocks."""
        return int(self._num_of_partition[1] > self._num_of_partition[0])

    def add(self, block: int, *, has_content: bool, is_partial: bool = False) -> None:
        """Add the block that was released last."""
        self._num_of_partition[self._partitions[block]] += 1
        if not has_content:
            self._blank.add(block)
        elif is_partial and block not in self._kept:
            self._partial.add(block)
        else:
            self._queue(block).add(block)
            self._num_ranked += block in self._kept

    def remove(self, block: int) -> None:
        """Remove this block; its priority stays."""
        self._num_of_partition[self._partitions[block]] -= 1
        for queue in (self._blank, self._partial):
            if block in queue:
                queue.remove(block)
                return
        self._queue(block).remove(block)
        self._num_ranked -= block in self._kept

    def pop(self, partition: int = 0) -> int:
        """Remove and return the next block to evict, and keep its priority. The list must
        not be empty.
        """
        block = self._pop(partition)
        self._num_of_partition[self._partitions[block]] -= 1
        return block

    def _pop(self, partition: int) -> int:
        if self._blank:
            return self._blank.pop(partition)
        if self._partial:
            return self._partial.pop_old(partition)
        if self._ends:
            self._end_overdue()
        if not self._num_ranked:
            return self._usual.pop_old(partition)
        queues = [item for item in self._ranked.items() if item[1]]
        if self._usual:
            queues.append((DEFAULT_PRIORITY, self._usual))
        priority, queue = min(queues, key=lambda item: item[0])
        self._num_ranked -= priority != DEFAULT_PRIORITY
        return queue.pop_old(partition)

    def priority_of(self, block: int) -> int:
        """The priority of a block's content."""
        kept = self._kept.get(block)
        return DEFAULT_PRIORITY if kept is None else kept[0]

    def retain(self, block: int, retention: Retention) -> None:
        """Set how long a block's content is kept, from now on."""
        if self._ends:
            self._end_overdue()
        self._num_words += 1
        self._rank(block, retention.priority)
        if retention.duration_s and block in self._kept:
            end = self._clock() + retention.duration_s
            heapq.heappush(self._ends, (end, self._num_words, block))
            if len(self._ends) > _FEW_ENDS + 2 * len(self._kept):
                self._ends = [each for each in self._ends if self._holds(each)]
                heapq.heapify(self._ends)

    def forget(self, block: int) -> None:
        """Drop the priority of a block without content."""
        if block in self._kept:
            self._rank(block, DEFAULT_PRIORITY)

    def _rank(self, block: int, priority: int) -> None:
        is_free = self._has_free(block)
        if is_free:
            self.remove(block)
        self._kept.pop(block, None)
        if priority != DEFAULT_PRIORITY:
            self._kept[block] = priority, self._num_words
        if is_free:
            self.add(block, has_content=True)

    def _has_free(self, block: int) -> bool:
        """Whether this block is free and has content."""
        return block in self._partial or block in self._queue(block)

    def _queue(self, block: int) -> _Queue:
        """The queue of a free block with content."""
        kept = self._kept.get(block) if self._kept else None
        if kept is None:
            return self._usual
        if kept[0] not in self._ranked:
            self._ranked[kept[0]] = _Queue(self._partitions)
        return self._ranked[kept[0]]

    def _end_overdue(self) -> None:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            end = heapq.heappop(self._ends)
            if self._holds(end):
                self._rank(end[2], DEFAULT_PRIORITY)

    def _holds(self, end: tuple[float, int, int]) -> bool:
        """Whether an entry is the latest of its block."""
        _, word, block = end
        kept = self._kept.get(block)
        return kept is not None and kept[1] == word
