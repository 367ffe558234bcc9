"""Collectives among CPU ranks of one host through memory that all of them map."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from trimaran.comm.collectives.tensor_group import TensorParallelGroup
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.transport.shared_memory import (
    CACHE_LINE_BYTES,
    WORDS_A_LINE,
    Futex,
    SharedSegment,
    fence,
)

SLOT_BYTES = 1 << 20
"""Bytes of the largest chunk that one round moves; longer tensors take several rounds."""

ONE_SHOT_BYTES = 64 << 10
"""Bytes up to which every rank adds up everything; beyond, each rank adds a part and they
exchange parts."""

# Checks before sleeping take far more than the usual wait of a few us. Their number is not
# limited: on a busy core a yield may take milliseconds, and a lost rank would be noticed late.
_SPIN_S = 0.0003
_LONGEST_SLEEP_S = 0.001
_MAX_CACHED_VIEWS = 1024


class SharedMemoryGroup(TensorParallelGroup):
    """Ranks that copy into their own slots, raise a flag and read the slots of other ranks.

    A rank's cache line holds its flag, which counts the phases that the rank has finished, and
    whether a rank sleeps until the flag changes. Each rank has two slots, used in turn. A slot
    is written again only when every rank has entered the operation after the one that read the
    slot. Sums run in rank order, so every rank gets the same bits.
    """

    def __init__(self, world: World, segment: SharedSegment, timeout_s: float) -> None:
        self.rank = world.rank
        self.size = world.size
        self._root_ranks = world.root_ranks
        self._segment = segment
        self.timeout_s = timeout_s
        words = segment.words()[: self.size * WORDS_A_LINE]
        self._flags = words[::WORDS_A_LINE]
        self._sleepers = words[1::WORDS_A_LINE]
        lines = range(segment.address, segment.address + len(words) * 8, CACHE_LINE_BYTES)
        self._futexes = [Futex(address) for address in lines]
        self._count = 0
        self._entry_of_last = 0
        self._turn = 0
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    @classmethod
    def connect(cls, world: World, timeout_s: float) -> SharedMemoryGroup:
        """Collective over ``world``, whose ranks share a host."""
        if world.rank == 0:
            num_bytes = world.size * (CACHE_LINE_BYTES + 2 * SLOT_BYTES)
            segment = SharedSegment.create(num_bytes)
            world.comm.bcast(segment.handle)
        else:
            segment = SharedSegment.attach(world.comm.bcast(None))
        world.comm.Barrier()
        segment.close_descriptor()
        return cls(world, segment, timeout_s)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; returns ``tensor``."""
        if tensor.is_contiguous():
            for chunk in _chunks(tensor.view(-1)):
                self._reduce_chunk(chunk)
            return tensor
        return tensor.copy_(self.all_reduce(tensor.contiguous()))

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks joined along ``dim`` in rank order, new memory."""
        flat = tensor.contiguous().view(-1)
        if flat.numel() * flat.element_size() <= SLOT_BYTES:
            parts = [part.view(tensor.shape) for part in self._exchange(flat)]
            return torch.cat(parts, dim)
        gathered = torch.empty((self.size, flat.numel()), dtype=flat.dtype)
        start = 0
        for chunk in _chunks(flat):
            end = start + chunk.numel()
            for rank, part in enumerate(self._exchange(chunk)):
                gathered[rank, start:end] = part
            start = end
        return torch.cat([part.view(tensor.shape) for part in gathered], dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with that of group rank ``src``; returns ``tensor``."""
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        for chunk in _chunks(flat.view(-1)):
            parts = self._exchange(chunk, is_source=self.rank == src)
            if self.rank != src:
                chunk.copy_(parts[src])
        return tensor if flat is tensor else tensor.copy_(flat)

    def all_to_all(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Send different rows to each rank; returns the received rows in rank order."""
        own = rows.contiguous()
        row_bytes = own.element_size() * math.prod(own.shape[1:])
        windows = AllToAllWindows(
            [[count * row_bytes for count in row] for row in counts], self.rank
        )
        received = own.new_empty((sum(row[self.rank] for row in counts), *own.shape[1:]))
        source, target = own.data_ptr(), received.data_ptr()
        here, there, size = windows.kept
        ctypes.memmove(target + there, source + here, size)
        for start in range(0, windows.longest, SLOT_BYTES):
            self._enter()
            slots = [slot.data_ptr() for slot in self._slot_views(SLOT_BYTES, torch.uint8)]
            for here, there, size in windows.sent(start, SLOT_BYTES):
                ctypes.memmove(slots[self.rank] + there, source + here, size)
            self._raise_and_wait("all_to_all")
            for rank, here, there, size in windows.received(start, SLOT_BYTES):
                ctypes.memmove(target + there, slots[rank] + here, size)
        return received

    def barrier(self) -> None:
        """Wait until every rank of the group is here."""
        self._enter()
        self._raise_and_wait("barrier")

    def transport_of(self, num_bytes: int) -> str:
        """Always shared memory, in rounds of `SLOT_BYTES`."""
        return "shared_memory"

    # ---- one round ----------------------------------------------------------------------

    def _reduce_chunk(self, chunk: torch.Tensor) -> None:
        views = self._exchange(chunk)
        num_bytes = chunk.numel() * chunk.element_size()
        if self.size == 2 or num_bytes <= ONE_SHOT_BYTES:
            _add_up(views, chunk)
            return
        # No other rank reads this rank's part of this rank's slot before the second flag, so
        # the sum is written there.
        part = -(-chunk.numel() // self.size)
        own = slice(self.rank * part, (self.rank + 1) * part)
        _add_up([view[own] for view in views], views[self.rank][own])
        self._raise_and_wait("all_reduce")
        for rank, view in enumerate(views):
            chunk[rank * part : (rank + 1) * part] = view[rank * part : (rank + 1) * part]

    def _exchange(self, chunk: torch.Tensor, is_source: bool = True) -> list[torch.Tensor]:
        """Show ``chunk`` to all ranks; returns views of all ranks' pieces, valid until the next
        call.

        Without ``is_source`` this rank shows nothing.
        """
        self._enter()
        views = self._slot_views(chunk.numel(), chunk.dtype)
        if is_source:
            own = views[self.rank]
            num_bytes = chunk.numel() * chunk.element_size()
            ctypes.memmove(own.data_ptr(), chunk.data_ptr(), num_bytes)
        self._raise_and_wait("exchange")
        return views

    def _enter(self) -> None:
        """Begin an operation: this rank's slots are free once all ranks have entered the last
        one."""
        self._wait(self._entry_of_last, "entry")
        self._entry_of_last = self._count + 1
        self._turn ^= 1

    def _raise_and_wait(self, phase: str) -> None:
        self._count += 1
        fence()
        self._flags[self.rank] = self._count
        # A sleeper that misses this wake-up wakes by itself after `_LONGEST_SLEEP_S`.
        if self._sleepers[self.rank]:
            self._sleepers[self.rank] = 0
            self._futexes[self.rank].wake()
        self._wait(self._count, phase)

    def _wait(self, count: int, phase: str) -> None:
        flags = self._flags
        for rank in range(self.size):
            if flags[rank] >= count:
                continue
            spins_until = time.monotonic() + _SPIN_S
            while flags[rank] < count:
                if time.monotonic() >= spins_until:
                    self._sleep_until(rank, count, phase)
                    break
                os.sched_yield()
        fence()

    def _sleep_until(self, rank: int, count: int, phase: str) -> None:
        """Sleep in the kernel until ``rank`` has raised its flag to ``count``."""
        limit = TimeLimit(self.timeout_s)
        while (seen := self._flags[rank]) < count:
            if limit.has_passed():
                raise PeerLostError(self._describe_late(count, phase))
            self._sleepers[rank] = 1
            self._futexes[rank].wait(seen, _LONGEST_SLEEP_S)

    def _describe_late(self, count: int, phase: str) -> str:
        names = self._root_ranks
        late = {names[rank]: n for rank, n in enumerate(self._flags) if n < count}
        return (
            f"rank(s) {list(late)} did not reach phase {count} ({phase}) of the group of ranks "
            f"{list(names)} within {self.timeout_s:.3g} s; they are at {list(late.values())}"
        )

    def _slot_views(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's current slot as a tensor of that many elements."""
        key = (self._turn, numel, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            first = self.size * CACHE_LINE_BYTES + self._turn * self.size * SLOT_BYTES
            views = [
                torch.frombuffer(
                    self._segment.map,
                    dtype=dtype,
                    count=numel,
                    offset=first + rank * SLOT_BYTES,
                )
                for rank in range(self.size)
            ]
            self._views[key] = views
        return views


def _chunks(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most a slot each."""
    step = SLOT_BYTES // flat.element_size()
    if 0 < flat.numel() <= step:
        yield flat
        return
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


def _add_up(views: list[torch.Tensor], out: torch.Tensor) -> None:
    """Sum in rank order; 16-bit floats in float32, rounded once. ``out`` may be a view."""
    if len(views) == 2:
        torch.add(views[0], views[1], out=out)
        return
    is_short = out.dtype in (torch.float16, torch.bfloat16)
    total = views[0].float() if is_short else views[0].clone()
    for view in views[1:]:
        total += view
    out.copy_(total)


class AllToAllWindows:
    """The windows of one all-to-all, as one rank sees them.

    Each rank shows the bytes for other ranks as one row, in order of the ranks. A window is
    a part of that row, at the same place in the rows of all ranks. Bytes that a rank sends
    to itself are copied directly and appear in no window.
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
        """Size of the longest row, in bytes."""

    @property
    def kept(self) -> tuple[int, int, int]:
        """The bytes that a rank sends to itself: source offset, target offset, size."""
        rank = self._rank
        return self._held_at[rank], self._taken_at[rank], self._table[rank][rank]

    def sent(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Each range that this rank shows in a window: source offset, offset in the window,
        size."""
        for other in range(len(self._table)):
            found = self._overlap(self._rank, other, start, length)
            if found is not None:
                offset, at, size = found
                yield self._held_at[other] + offset, at, size

    def received(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Each range for this rank in a window: source rank, offset in the window, target
        offset, size."""
        for other in range(len(self._table)):
            found = self._overlap(other, self._rank, start, length)
            if found is not None:
                offset, at, size = found
                yield other, at, self._taken_at[other] + offset, size

    def _overlap(
        self, source: int, target: int, start: int, length: int
    ) -> tuple[int, int, int] | None:
        """The overlap of a window with the bytes from ``source`` to ``target``: offset in those
        bytes, offset in the window, size."""
        if source == target:
            return None
        first, end = self._shown_at[source][target : target + 2]
        begin = max(first, start)
        size = min(end, start + length) - begin
        return (begin - first, begin - start, size) if size > 0 else None
