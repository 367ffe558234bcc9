"""The two sides of a GPU's memory: which addresses lie near which processors.

The second-level cache of a Hopper GPU has two halves. Each holds the memory that is attached
to it and serves the processors on its side; what these ask of the other half comes by way of
it. So a kernel whose processors read what lies on their own side takes less power, and a little
less time. Nothing documents where an address lies, so it is measured: an atomic operation is
done where its address belongs, and takes half as long from there.

Within a page of 2 MiB the side is the parity of some bits of the address, a mask that differs
from model to model (0xAB000 on an H200, 0xB3000 on an H100 with 80 GB) but has 4 KiB as its
lowest bit on either. That reductions save a tenth of their power so was shown by A. Demeure
(github.com/ademeure/QuickRunCUDA, tests/side_aware.cu).
"""

from __future__ import annotations

import ctypes
import logging
import random
import time
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule

logger = logging.getLogger(__name__)

SIDE_BYTES = 4096
"""So much lies on one side before the other one's turn: a mask's lowest bit."""

PAGE_BYTES = 2 << 20

MAX_PROCESSORS = 256

_SOURCE = "memory_sides"
_UNUSED = "the sides of memory are not used: %s"
_WHOLE_PROCESSOR_BYTES = 200_000
_SAMPLED = 400
_REPEATS, _PAGE_REPEATS = 8, 3
_LEAST_CLARITY = 0.4
"""Of the median distance between near and far: what is nearer the middle is unclear."""

_LEAST_BYTES = 64 << 20


def changes(address: int, mask: int) -> bool:
    """Whether an address within its page lies on the other side than the page's start."""
    return bool((address & mask).bit_count() % 2)


@dataclass(frozen=True, slots=True)
class MemorySides:
    """Where the addresses of one allocation lie, and where the processors."""

    mask: int
    """Bits of an address within its page whose parity says the side."""

    first_page: int
    """The page in which the allocation begins, counted from address 0."""

    pages: bytes
    """Of each page 0 or 1: with the parity of an address within it, the side."""

    page_bits: Tensor
    """The same as int32 [pages / 32], on the device: a bit a page, from the lowest on."""

    processor_sides: tuple[int, ...]
    """Bits of `MAX_PROCESSORS` processors by their number, 32 a word."""

    fitting: dict[int, bool] = field(default_factory=dict)
    """What `cache_sides` found of the parts that begin at these addresses."""

    def side(self, address: int) -> int:
        """0 or 1; the address lies in the allocation."""
        return self.pages[address // PAGE_BYTES - self.first_page] ^ changes(address, self.mask)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_void_p), ("cycles", ctypes.c_void_p),
        ("count", ctypes.c_int), ("repeats", ctypes.c_int),
    )  # fmt: skip


_known: dict[int, MemorySides] = {}


@lru_cache
def mask_of(device: torch.device) -> int:
    """Bits of an address within its page whose parity says the side, measured once.

    0 where the device's memory has no sides that this module knows of; on a Hopper GPU with
    the reason in the log.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    memory = torch.empty(2 * PAGE_BYTES, dtype=torch.uint8, device=device)
    try:
        return _Survey(memory).mask()
    except KernelsUnavailableError as error:
        logger.warning(_UNUSED, error)
        return 0


def measure(memory: Tensor) -> MemorySides | None:
    """Find the sides of an allocation on a Hopper GPU, which `sides_of` knows from then on.

    ``memory`` is contiguous and keeps its contents; some tenths of a second for 100 GiB. None
    for little of it, and, with the reason in the log, where what is measured does not fit what
    is known of sides.
    """
    forget(memory)
    mask = mask_of(memory.device)
    if not mask or memory.nbytes < _LEAST_BYTES:
        return None
    begin = time.monotonic()
    try:
        sides = _Survey(memory).sides(mask)
    except KernelsUnavailableError as error:
        logger.warning(_UNUSED, error)
        return None
    _known[memory.untyped_storage().data_ptr()] = sides
    logger.info(
        "memory has two sides, by the bits %#x of an address: %.1f GiB measured in %.2f s",
        mask,
        memory.nbytes / 2**30,
        time.monotonic() - begin,
    )
    return sides


def forget(memory: Tensor) -> None:
    """Before an allocation is given back: its addresses may come to lie elsewhere."""
    _known.pop(memory.untyped_storage().data_ptr(), None)


def sides_of(tensor: Tensor) -> MemorySides | None:
    """Of the allocation that ``tensor`` is a view of, if it was measured."""
    return _known.get(tensor.untyped_storage().data_ptr())


class _Survey:
    """The measurements of one allocation. Side 0 is that of its first whole page's start.

    Raises `KernelsUnavailableError` where anything is unclear.
    """

    def __init__(self, memory: Tensor) -> None:
        self._begin = memory.data_ptr()
        # The kernel may ask for the word behind an address.
        self._end = self._begin + memory.nbytes - 8
        self._device = memory.device
        properties = torch.cuda.get_device_properties(memory.device)
        self._num_processors = properties.multi_processor_count
        if self._num_processors > MAX_PROCESSORS:
            raise KernelsUnavailableError(f"there are {self._num_processors} processors")
        self._page = -(-self._begin // PAGE_BYTES) * PAGE_BYTES
        self._processors = self._of_processors(self._page)

    def mask(self) -> int:
        """Bits of an address within its page that change the side."""
        bits = [1 << bit for bit in range(3, PAGE_BYTES.bit_length() - 1)]
        asked = [self._page, *(self._page + bit for bit in bits)]
        first, *others = self._of(asked, _REPEATS).tolist()
        mask = sum(bit for bit, side in zip(bits, others, strict=True) if side != first)
        if mask & -mask != SIDE_BYTES:
            raise KernelsUnavailableError(f"sides change by the bits {mask:#x} of an address")
        return mask

    def sides(self, mask: int) -> MemorySides:
        """Where all of the allocation lies, if sides change by ``mask`` there."""
        first, end = self._begin // PAGE_BYTES, -(-self._end // PAGE_BYTES)
        starts = [max(self._begin, page * PAGE_BYTES) for page in range(first, end)]
        found = self._of(starts, _PAGE_REPEATS).tolist()
        pages = [side ^ changes(start, mask) for side, start in zip(found, starts, strict=True)]
        words = torch.tensor(_words(pages), dtype=torch.int64)
        sides = MemorySides(
            mask=mask,
            first_page=first,
            pages=bytes(pages),
            page_bits=torch.where(words >= 1 << 31, words - (1 << 32), words)
            .to(torch.int32)
            .to(self._device),
            processor_sides=_words(
                [*self._processors.tolist(), *[False] * (MAX_PROCESSORS - self._num_processors)]
            ),
        )
        self._check(sides)
        return sides

    def _of_processors(self, page: int) -> Tensor:
        """bool [processors]: the first singular vector of times tells who is near whom."""
        addresses = [page, *self._drawn(page, page + PAGE_BYTES)]
        cycles = self._cycles(addresses, _REPEATS).double().cpu()
        if not bool(cycles.all()):
            raise KernelsUnavailableError("not every processor had a block")
        cycles -= cycles.mean(1, keepdim=True)
        cycles -= cycles.mean(0, keepdim=True)
        left, _, right = torch.linalg.svd(cycles, full_matrices=False)
        _check_clear(left[:, 0], "processors")
        _check_clear(right[0], "addresses")
        # Far takes longer: the product of both signs is positive.
        far: Tensor = left[:, 0] * right[0, 0] > 0
        return far

    def _check(self, sides: MemorySides) -> None:
        """That what was found says where any address lies."""
        addresses = self._drawn(self._begin, self._end)
        found = self._of(addresses, _PAGE_REPEATS).tolist()
        for address, side in zip(addresses, found, strict=True):
            if side != sides.side(address):
                raise KernelsUnavailableError(f"address {address:#x} is not where it should be")

    def _drawn(self, begin: int, end: int) -> list[int]:
        draw = random.Random(0)
        return [draw.randrange(begin // 8, end // 8) * 8 for _ in range(_SAMPLED)]

    def _of(self, addresses: list[int], repeats: int) -> Tensor:
        """bool [addresses]: the side of each, which it is nearer to."""
        cycles = self._cycles(addresses, repeats).float()
        of_one = self._processors.to(self._device)
        later = (cycles[~of_one].mean(0) - cycles[of_one].mean(0)).cpu()
        _check_clear(later, "addresses")
        return later > 0

    def _cycles(self, addresses: list[int], repeats: int) -> Tensor:
        """int32 [processors, addresses]: how long each waits for each address."""
        count = len(addresses)
        asked = torch.tensor(addresses, device=self._device)
        cycles = torch.zeros(
            (self._num_processors, count), dtype=torch.int32, device=self._device
        )
        arguments = _Arguments(asked.data_ptr(), cycles.data_ptr(), count, repeats)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _kernel(self._device).launch(self._num_processors, stream, arguments)
        return cycles


def _check_clear(values: Tensor, what: str) -> None:
    distances = values.abs()
    if float(distances.min()) < _LEAST_CLARITY * float(distances.median()):
        raise KernelsUnavailableError(f"the sides of {what} are unclear")


def _words(bits: list[bool]) -> tuple[int, ...]:
    """32 bits a word, from the lowest on."""
    return tuple(
        sum(bit << place for place, bit in enumerate(bits[first : first + 32]))
        for first in range(0, len(bits), 32)
    )


@lru_cache
def _kernel(device: torch.device) -> CudaKernel:
    module = CudaModule(load_cubin(_SOURCE, "sm_90a"))
    # With so much shared memory each block has a processor of its own.
    return module.kernel(_SOURCE, device, num_threads=32, shared_bytes=_WHOLE_PROCESSOR_BYTES)
