"""Fast launches of Triton kernels, which may begin before their predecessor has ended."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]

_INT32_END = 1 << 31


@functools.cache
def can_overlap(device: int) -> bool:
    """Whether kernels on a GPU may begin before their predecessor has ended.

    With programmatic dependent launch (CUDA 12, Hopper and later) a kernel may at once read
    what no kernel of the step writes, and must call ``gdc_wait`` before it accesses other
    memory. In a chain of kernels that covers all predecessors, since each kernel waits before
    it ends.
    """
    if device < 0 or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def padded_size(size: int) -> int:
    """The smallest power of two that is at least ``size``. Triton's own function takes the
    host longer.
    """
    return 1 << (size - 1).bit_length()


def num_tiles(size: int, tile: int) -> int:
    """The number of tiles that cover ``size``."""
    return -(-size // tile)


class Launcher:
    """Launches one Triton kernel.

    Triton inspects every argument to find the compiled variant, which takes the host three
    times as long as the launch. This class does one lookup by the properties that Triton
    specialises on. The kernel has OVERLAPS as its last constant, true where it may overlap
    others.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Launch on the current stream of the first argument's device, which is the current
        device.

        ``args`` are tensors, integers and floats in the kernel's order, followed by its
        ``constants``.
        """
        device = args[0].get_device()
        key: list[Any] = [device, num_warps, num_stages, constants]
        for arg in args:
            # Tensors are recognised by exclusion: isinstance with Tensor is slow for other
            # types.
            if isinstance(arg, int):
                key.append(_kind(arg))
            elif not isinstance(arg, float):
                key += (arg.dtype, arg.data_ptr() & 15)
        found = self._compiled.get(tuple(key))
        if found is None:
            self._compile(tuple(key), grid, args, constants)
            return
        kernel, constants = found
        kernel.run(
            *grid, 1, driver.active.get_current_stream(device), kernel.function,
            kernel.packed_metadata, None, None, None, *args, *constants,
        )  # fmt: skip

    def compile_ahead(
        self, device: torch.device, types: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        """Compile a variant with the usual numbers of warps and stages, without a launch.

        ``types`` are dtypes for tensors, and numbers of the same specialisation for numbers.
        Safe in a thread beside other threads.
        """
        options = {"num_warps": 4, "num_stages": 3}
        with torch.cuda.device(device):
            overlaps = can_overlap(torch.cuda.current_device())
            if overlaps:
                options["launch_pdl"] = True
            self._kernel.warmup(*types, *constants, overlaps, grid=(1,), **options)

    def _compile(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, int],
        args: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch through Triton, which compiles if needed, and keep the compiled variant."""
        device, num_warps, num_stages = key[:3]
        options = {"num_warps": num_warps, "num_stages": num_stages}
        overlaps = can_overlap(device)
        constants = (*constants, overlaps)
        if overlaps:
            options["launch_pdl"] = True
        kernel = self._kernel[grid](*args, *constants, **options)
        # The interpreter has no compiled variant.
        if kernel is not None:
            self._compiled[key] = (kernel, constants)


def _kind(value: int) -> int:
    """Triton's specialisation of an integer: 1, multiples of 16 and others, of 32 or 64
    bits.
    """
    kind = 2 if value == 1 else 0 if value & 15 == 0 else 1
    return kind if -_INT32_END <= value < _INT32_END else kind + 3
