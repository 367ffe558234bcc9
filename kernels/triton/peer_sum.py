"""Sums over the ranks of a tensor group in one launch, through memory that all ranks map."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.triton.launch import Launcher, num_tiles

# Each rank has a region that all ranks map: flags, one for each program and rank, and then two
# slots of equal size, which alternate. A program copies its part of the tensor into its own
# slot, raises its flag at every rank and waits for the flags of all ranks. The program then
# reads the slots of the other ranks. A slot is written again two calls later. By then every
# rank has begun the call in between, because each rank waits for a flag of every other rank in
# every call. Every rank has therefore finished the call that reads the slot.

NUM_PROGRAMS = 128
"""Programs of a launch, including those without a part: they count the calls too. All of
them must run at the same time, since they wait for the same programs of other ranks.
"""

TILE = 4096
"""Elements that a program has in flight from each rank."""

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _meet(peers, own, count, rank, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until the same program of every other rank has arrived: also a memory barrier."""
    place = tl.program_id(0) * SIZE
    # All threads have written before one of them raises the flag.
    tl.debug_barrier()
    # Each rank begins with another peer, so that not all ranks read one peer at once.
    for step in tl.static_range(1, SIZE):
        theirs = tl.load(peers + (rank + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + place + rank, count, sem="release", scope="sys")
    flags = own.to(tl.pointer_type(tl.int64)) + place
    for step in tl.static_range(1, SIZE):
        while (
            tl.atomic_add(flags + (rank + step) % SIZE, 0, sem="acquire", scope="sys") < count
        ):
            pass
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _total(peers, base, offsets, mask, like, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of all ranks' slots at ``offsets``, in rank order, in float32."""
    total = tl.zeros((TILE,), tl.float32)
    for peer in tl.static_range(SIZE):
        slot = tl.multiple_of((tl.load(peers + peer) + base).to(like.dtype), 16)
        total += tl.load(slot + offsets, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rank", "num_active"])  # type: ignore[untyped-decorator,unused-ignore]
def _one_shot_kernel(  # type: ignore[no-untyped-def]
    x, peers, calls, rank, num_elements, part, num_active, header, slot_bytes,
    SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program p sums elements p * part to (p + 1) * part of all ranks, into x."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    count = tl.load(calls + program) + 2
    if program < num_active:
        base = header + (count // 2 % 2) * slot_bytes
        own = tl.load(peers + rank)
        mine = tl.multiple_of((own + base).to(x.dtype), 16)
        first = program * part
        end = tl.minimum(first + part, num_elements)
        for start in range(first, end, TILE):
            offsets = start + tl.arange(0, TILE)
            mask = offsets < end
            tl.store(mine + offsets, tl.load(x + offsets, mask=mask), mask=mask)
        _meet(peers, own, count, rank, SIZE)
        for start in range(first, end, TILE):
            offsets = start + tl.arange(0, TILE)
            mask = offsets < end
            total = _total(peers, base, offsets, mask, x, SIZE, TILE)
            tl.store(x + offsets, total.to(x.dtype.element_ty), mask=mask)
    tl.store(calls + program, count)


@triton.jit(do_not_specialize=["rank", "num_active"])  # type: ignore[untyped-decorator,unused-ignore]
def _two_shot_kernel(  # type: ignore[no-untyped-def]
    x, peers, calls, rank, num_elements, part, num_active, header, slot_bytes,
    SIZE: tl.constexpr, TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Each rank sums a share, of which program p has ``part`` elements; then all shares are
    read.
    """
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    count = tl.load(calls + program) + 2
    if program < num_active:
        base = header + (count // 2 % 2) * slot_bytes
        own = tl.load(peers + rank)
        mine = tl.multiple_of((own + base).to(x.dtype), 16)
        share = part * num_active
        for peer in tl.static_range(SIZE):
            for start in range(0, part, TILE):
                inside = start + tl.arange(0, TILE)
                offsets = peer * share + program * part + inside
                mask = (inside < part) & (offsets < num_elements)
                tl.store(mine + offsets, tl.load(x + offsets, mask=mask), mask=mask)
        _meet(peers, own, count - 1, rank, SIZE)
        for start in range(0, part, TILE):
            inside = start + tl.arange(0, TILE)
            offsets = rank * share + program * part + inside
            mask = (inside < part) & (offsets < num_elements)
            total = _total(peers, base, offsets, mask, x, SIZE, TILE)
            # No other rank reads this rank's part of its slot before the second barrier.
            tl.store(mine + offsets, total.to(x.dtype.element_ty), mask=mask)
        _meet(peers, own, count, rank, SIZE)
        for peer in tl.static_range(SIZE):
            slot = tl.multiple_of((tl.load(peers + peer) + base).to(x.dtype), 16)
            for start in range(0, part, TILE):
                inside = start + tl.arange(0, TILE)
                offsets = peer * share + program * part + inside
                mask = (inside < part) & (offsets < num_elements)
                tl.store(x + offsets, tl.load(slot + offsets, mask=mask), mask=mask)
    tl.store(calls + program, count)


_one_shot = Launcher(_one_shot_kernel)
_two_shot = Launcher(_two_shot_kernel)


class PeerSum:
    """Sums tensors of up to ``slot_bytes`` over the ranks, in place; larger tensors in chunks,
    if ``takes_any``.

    In the one-shot algorithm every rank adds up everything; in the two-shot algorithm each rank
    adds up a share and all ranks read the shares. Float types; added in float32 in rank order
    and rounded once, so all ranks get equal bits, regardless of algorithm and size. Safe under
    graph capture: values that change from call to call lie in memory. Collective, on one
    stream.
    """

    def __init__(
        self,
        addresses: list[int],
        rank: int,
        slot_bytes: int,
        one_shot_bytes: int,
        device: torch.device,
        memory: object = None,
        *,
        takes_any: bool = False,
        num_programs: int = NUM_PROGRAMS,
    ) -> None:
        """``addresses`` are the addresses of each rank's region (see `region_bytes`) as
        mapped here, multiples of 16; regions are zero before any rank's first call.
        ``memory`` keeps the regions mapped.
        """
        self._memory = memory
        self._takes_any = takes_any
        self._num_programs = num_programs
        self.rank = rank
        self.size = len(addresses)
        self._slot_bytes = slot_bytes
        self._one_shot_bytes = one_shot_bytes
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._calls = torch.zeros(NUM_PROGRAMS, dtype=torch.int64, device=device)

    def takes(self, tensor: Tensor) -> bool:
        """Whether this object can sum this tensor."""
        num_bytes = tensor.numel() * tensor.element_size()
        return tensor.is_floating_point() and num_bytes > 0 and bool(self.way_of(num_bytes))

    def way_of(self, num_bytes: int) -> str:
        """``one-shot`` or ``two-shot``; empty if the tensor is too large."""
        if num_bytes > self._slot_bytes and not self._takes_any:
            return ""
        return "one-shot" if num_bytes <= self._one_shot_bytes else "two-shot"

    def __call__(self, tensor: Tensor) -> None:
        """Overwrite a contiguous ``tensor`` with the sum."""
        size = self._slot_bytes // tensor.element_size()
        if tensor.numel() <= size:
            self._sum(tensor)
            return
        flat = tensor.view(-1)
        for piece in (flat[start : start + size] for start in range(0, len(flat), size)):
            self._sum(piece)

    def _sum(self, tensor: Tensor) -> None:
        count = tensor.numel()
        is_one_shot = self.way_of(count * tensor.element_size()) == "one-shot"
        share = count if is_one_shot else num_tiles(count, self.size)
        num_active = min(self._num_programs, num_tiles(share, TILE))
        # Whole cache lines for each program.
        part = 64 * num_tiles(num_tiles(share, num_active), 64)
        kernel = _one_shot if is_one_shot else _two_shot
        args: tuple[Any, ...] = (
            tensor, self._peers, self._calls, self.rank, count, part, num_active,
            _header_bytes(self.size), self._slot_bytes,
        )  # fmt: skip
        kernel((self._num_programs, 1), args, (self.size, TILE), WARPS)


def region_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of one rank's region in a group of ``size``, for tensors of ``slot_bytes``."""
    return _header_bytes(size) + 2 * slot_bytes


def _header_bytes(size: int) -> int:
    return 128 * num_tiles(8 * NUM_PROGRAMS * size, 128)
