"""The two L2 partitions of a Hopper GPU: which addresses are near which multiprocessors.

The L2 cache of a Hopper GPU has two partitions. Each caches the memory attached to it and
serves the multiprocessors near it; their reads of the other partition's memory pass through
their own. A kernel whose multiprocessors read only near memory takes less power, and slightly
less time. The mapping is undocumented and therefore measured: an atomic operation runs in the
partition of its address, and takes half as long from a near multiprocessor.

Within a page of 2 MiB the partition is the parity of some bits of the address. The mask of
these bits differs between models (0xAB000 on an H200, 0xB3000 on an H100 with 80 GB), but has 4
KiB as its lowest bit on both. A. Demeure showed that reductions save a tenth of their power
this way (github.com/ademeure/QuickRunCUDA, tests/side_aware.cu).
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

STRIPE_BYTES = 4096
"""Size of a stripe, after which the partition alternates: a mask's lowest bit."""

PAGE_BYTES = 2 << 20

MAX_PROCESSORS = 256

_SOURCE = "l2_latency"
_UNUSED = "the L2 partitions are not used: %s"
_WHOLE_PROCESSOR_BYTES = 200_000
_SAMPLED = 400
_REPEATS, _PAGE_REPEATS = 8, 3
_MIN_CLARITY = 0.4
"""Share of the median distance between near and far; measurements closer to the middle are
ambiguous.
"""

_MIN_BYTES = 64 << 20


def changes(address: int, mask: int) -> bool:
    """Whether an address within its page lies on another partition than the page's start."""
    return bool((address & mask).bit_count() % 2)


@dataclass(frozen=True, slots=True)
class L2Partitions:
    """The partitions of one allocation's addresses, and of the multiprocessors."""

    mask: int
    """Bits of an address within its page whose parity determines the partition."""

    first_page: int
    """The page in which the allocation begins, counted from address 0."""

    pages: bytes
    """For each page 0 or 1: exclusive or with the parity of an address gives the partition."""

    page_bits: Tensor
    """The same as int32 [pages / 32], on the device: one bit a page, lowest bit first."""

    processor_partitions: tuple[int, ...]
    """The partitions of `MAX_PROCESSORS` multiprocessors by number, 32 bits a word."""

    fitting: dict[int, bool] = field(default_factory=dict)
    """Whether `partitions_of_heads` supports the caches that begin at these addresses."""

    def partition(self, address: int) -> int:
        """The partition, 0 or 1, of an address in the allocation."""
        return self.pages[address // PAGE_BYTES - self.first_page] ^ changes(address, self.mask)


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("addresses", ctypes.c_void_p), ("cycles", ctypes.c_void_p),
        ("count", ctypes.c_int), ("repeats", ctypes.c_int),
    )  # fmt: skip


_known: dict[int, L2Partitions] = {}


@lru_cache
def mask_of(device: torch.device) -> int:
    """Bits of an address within its page whose parity determines the partition, measured once.

    0 if the device has no known partitions; on a Hopper GPU the log has the reason.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    memory = torch.empty(2 * PAGE_BYTES, dtype=torch.uint8, device=device)
    try:
        return _Survey(memory).mask()
    except KernelsUnavailableError as error:
        logger.warning(_UNUSED, error)
        return 0


def measure(memory: Tensor) -> L2Partitions | None:
    """Measure an allocation on a Hopper GPU; `partitions_of` then returns the result.

    ``memory`` is contiguous and keeps its contents; some tenths of a second for 100 GiB. None
    for a small allocation, or if the measurements contradict the known mapping; the log then
    has the reason.
    """
    forget(memory)
    mask = mask_of(memory.device)
    if not mask or memory.nbytes < _MIN_BYTES:
        return None
    begin = time.monotonic()
    try:
        partitions = _Survey(memory).partitions(mask)
    except KernelsUnavailableError as error:
        logger.warning(_UNUSED, error)
        return None
    _known[memory.untyped_storage().data_ptr()] = partitions
    logger.info(
        "L2 has two partitions, by the bits %#x of an address: %.1f GiB measured in %.2f s",
        mask,
        memory.nbytes / 2**30,
        time.monotonic() - begin,
    )
    return partitions


def forget(memory: Tensor) -> None:
    """Drop the record of an allocation before the allocation is freed: its addresses may be
    reused."""
    _known.pop(memory.untyped_storage().data_ptr(), None)


def partitions_of(tensor: Tensor) -> L2Partitions | None:
    """The partitions of the allocation that ``tensor`` is a view of; None if not measured."""
    return _known.get(tensor.untyped_storage().data_ptr())


class _Survey:
    """The measurements of one allocation. Partition 0 is that of its first whole page's start.

    Raises `KernelsUnavailableError` if a measurement is ambiguous.
    """

    def __init__(self, memory: Tensor) -> None:
        self._begin = memory.data_ptr()
        # The kernel may read the word behind an address.
        self._end = self._begin + memory.nbytes - 8
        self._device = memory.device
        properties = torch.cuda.get_device_properties(memory.device)
        self._num_processors = properties.multi_processor_count
        if self._num_processors > MAX_PROCESSORS:
            raise KernelsUnavailableError(f"there are {self._num_processors} processors")
        self._page = -(-self._begin // PAGE_BYTES) * PAGE_BYTES
        self._processors = self._of_processors(self._page)

    def mask(self) -> int:
        """Bits of an address within its page that change the partition."""
        bits = [1 << bit for bit in range(3, PAGE_BYTES.bit_length() - 1)]
        asked = [self._page, *(self._page + bit for bit in bits)]
        first, *others = self._of(asked, _REPEATS).tolist()
        mask = sum(
            bit for bit, partition in zip(bits, others, strict=True) if partition != first
        )
        if mask & -mask != STRIPE_BYTES:
            raise KernelsUnavailableError(
                f"partitions change by the bits {mask:#x} of an address"
            )
        return mask

    def partitions(self, mask: int) -> L2Partitions:
        """The partitions of the whole allocation, if they alternate by ``mask``."""
        first, end = self._begin // PAGE_BYTES, -(-self._end // PAGE_BYTES)
        starts = [max(self._begin, page * PAGE_BYTES) for page in range(first, end)]
        found = self._of(starts, _PAGE_REPEATS).tolist()
        pages = [
            partition ^ changes(start, mask)
            for partition, start in zip(found, starts, strict=True)
        ]
        words = torch.tensor(_words(pages), dtype=torch.int64)
        partitions = L2Partitions(
            mask=mask,
            first_page=first,
            pages=bytes(pages),
            page_bits=torch.where(words >= 1 << 31, words - (1 << 32), words)
            .to(torch.int32)
            .to(self._device),
            processor_partitions=_words(
                [*self._processors.tolist(), *[False] * (MAX_PROCESSORS - self._num_processors)]
            ),
        )
        self._check(partitions)
        return partitions

    def _of_processors(self, page: int) -> Tensor:
        """bool [processors]: the first singular vector of latencies separates the
        partitions.
        """
        addresses = [page, *self._drawn(page, page + PAGE_BYTES)]
        cycles = self._cycles(addresses, _REPEATS).double().cpu()
        if not bool(cycles.all()):
            raise KernelsUnavailableError("a multiprocessor had no thread block")
        cycles -= cycles.mean(1, keepdim=True)
        cycles -= cycles.mean(0, keepdim=True)
        left, _, right = torch.linalg.svd(cycles, full_matrices=False)
        _check_clear(left[:, 0], "processors")
        _check_clear(right[0], "addresses")
        # Far accesses take longer: the product of both signs is positive.
        far: Tensor = left[:, 0] * right[0, 0] > 0
        return far

    def _check(self, partitions: L2Partitions) -> None:
        """Check the mapping at random addresses."""
        addresses = self._drawn(self._begin, self._end)
        found = self._of(addresses, _PAGE_REPEATS).tolist()
        for address, partition in zip(addresses, found, strict=True):
            if partition != partitions.partition(address):
                raise KernelsUnavailableError(
                    f"address {address:#x} contradicts the partitions found"
                )

    def _drawn(self, begin: int, end: int) -> list[int]:
        draw = random.Random(0)
        return [draw.randrange(begin // 8, end // 8) * 8 for _ in range(_SAMPLED)]

    def _of(self, addresses: list[int], repeats: int) -> Tensor:
        """bool [addresses]: the partition that each address is nearer to."""
        cycles = self._cycles(addresses, repeats).float()
        of_one = self._processors.to(self._device)
        later = (cycles[~of_one].mean(0) - cycles[of_one].mean(0)).cpu()
        _check_clear(later, "addresses")
        return later > 0

    def _cycles(self, addresses: list[int], repeats: int) -> Tensor:
        """int32 [processors, addresses]: the latency of each address from each
        multiprocessor.
        """
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
    if float(distances.min()) < _MIN_CLARITY * float(distances.median()):
        raise KernelsUnavailableError(f"the partitions of {what} are ambiguous")


def _words(bits: list[bool]) -> tuple[int, ...]:
    """32 bits a word, lowest bit first."""
    return tuple(
        sum(bit << index for index, bit in enumerate(bits[first : first + 32]))
        for first in range(0, len(bits), 32)
    )


@lru_cache
def _kernel(device: torch.device) -> CudaKernel:
    module = CudaModule(load_cubin(_SOURCE, "sm_90a"))
    # This much shared memory lets a single block run on each multiprocessor.
    return module.kernel(_SOURCE, device, num_threads=32, shared_bytes=_WHOLE_PROCESSOR_BYTES)
