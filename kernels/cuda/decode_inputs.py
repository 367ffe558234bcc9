"""A decode step's inputs on Hopper, from numbers that come with the launch of one kernel."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.cuda.build import load_cubin
from trimaran.kernels.cuda.driver import CudaKernel, CudaModule
from trimaran.kernels.triton.inputs import StepTensors

logger = logging.getLogger(__name__)

# Shapes: R rows, L longest sequence, M blocks of a longest sequence, S entries.

MAX_ROWS = 256
"""Entries of a step, padding included."""

MAX_BLOCKS = 64
"""Blocks that a step may add. With `MAX_ROWS` entries, a launch has 2,640 bytes of arguments;
some drivers take no more than 4,096."""

_Int32Array = npt.NDArray[np.int32]
_SOURCE = "decode_inputs"


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("token_table", ctypes.c_uint64),
        ("block_tables", ctypes.c_uint64),
        ("wide", ctypes.c_uint64),
        ("narrow", ctypes.c_uint64),
        ("shifts", ctypes.c_uint64),
        ("row_len", ctypes.c_int),
        ("max_blocks", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("spare_row", ctypes.c_int),
        ("wide_stride", ctypes.c_int),
        ("narrow_stride", ctypes.c_int),
        ("num_entries", ctypes.c_int),
        ("num_padded", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("ring_slot", ctypes.c_int),
        ("entries", ctypes.c_int * (2 * MAX_ROWS)),
        ("new_blocks", ctypes.c_int * (2 * MAX_BLOCKS)),
    )


class DecodeInputs:
    """`triton.inputs.enter` and `prepare` for a step in which each entry decodes one token.

    The host packs a few hundred bytes and launches one kernel. Without trees and without drafts
    whose verification the host does not know. Tensors are in fixed memory, which the caller
    keeps.
    """

    def __init__(
        self, token_table_RL: Tensor, block_tables_RM: Tensor, target: StepTensors
    ) -> None:
        """Load the kernel.

        Raises:
            KernelsUnavailableError: the kernel cannot be compiled.
        """
        self._device = token_table_RL.device
        self._kernel = _kernel(self._device)
        self._max_blocks = block_tables_RM.stride(0)
        shifts = target.shifts
        self._arguments = _Arguments(
            token_table_RL.data_ptr(), block_tables_RM.data_ptr(), target.wide.data_ptr(),
            target.narrow.data_ptr(), 0 if shifts is None else shifts.data_ptr(),
            token_table_RL.stride(0), self._max_blocks, target.block_size,
            len(token_table_RL) - 1, target.wide.stride(0), target.narrow.stride(0),
        )  # fmt: skip
        self._entries = self._view(_Arguments.entries.offset, MAX_ROWS)
        self._new_blocks = self._view(_Arguments.new_blocks.offset, MAX_BLOCKS)

    def _view(self, offset: int, count: int) -> _Int32Array:
        found = np.frombuffer(self._arguments, np.int32, 2 * count, offset)  # type: ignore[call-overload]
        pairs: _Int32Array = found.reshape(count, 2)
        return pairs

    def launch(
        self,
        rows_S: _Int32Array,
        computed_S: _Int32Array,
        new_blocks: _Int32Array,
        num_padded: int,
        ring_slot: int,
    ) -> None:
        """Fill the target for a step of these rows, each with its next token.

        ``new_blocks`` [n, 4] has a KV group, row, index in the row's table and block id each,
        at most `MAX_BLOCKS`. The step is padded to ``num_padded`` entries, at most `MAX_ROWS`.
        """
        count, added = len(rows_S), len(new_blocks)
        self._entries[:count, 0] = rows_S
        self._entries[:count, 1] = computed_S
        if added:
            places = new_blocks[:, 1] * self._max_blocks + new_blocks[:, 2]
            self._new_blocks[:added, 0] = places
            self._new_blocks[:added, 1] = new_blocks[:, 3]
        arguments = self._arguments
        arguments.num_entries, arguments.num_padded = count, max(count, num_padded)
        arguments.num_blocks, arguments.ring_slot = added, ring_slot
        # Triton's call takes the host a tenth of torch's.
        stream = driver.active.get_current_stream(self._device.index)
        # The driver copies the arguments.
        self._kernel.launch(1, stream, arguments)


def decode_inputs(
    token_table_RL: Tensor, block_tables_RM: Tensor, target: StepTensors
) -> DecodeInputs | None:
    """The kernel for these tensors; None where Triton's kernels make all inputs."""
    device = token_table_RL.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        return DecodeInputs(token_table_RL, block_tables_RM, target)
    except KernelsUnavailableError as error:
        logger.warning("inputs of decodes are Triton's, at lower speed: %s", error)
        return None


def compile_decode_inputs() -> bytes:
    """Machine code of the kernel."""
    return load_cubin(_SOURCE, "sm_90a", (f"MAX_ROWS={MAX_ROWS}", f"MAX_BLOCKS={MAX_BLOCKS}"))


@lru_cache
def _kernel(device: torch.device) -> CudaKernel:
    return CudaModule(compile_decode_inputs()).kernel(_SOURCE, device, num_threads=MAX_ROWS)
