"""The adapters in a GPU's memory, and the tokens of a step that use them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimaran.kernels.adapters import (
    LARGE_BLOCK,
    SMALL_BLOCK,
    AdapterBlocks,
    AdapterTables,
    kernel_variants,
)
from trimaran.kernels.triton.lora import add_adapters
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import AdapterState
from trimaran.worker.lora.layout import AdapterLayout, PackedAdapter, Target
from trimaran.worker.lora.token_slots import token_blocks
from trimaran.worker.steps.step_types import Int32Array

_LARGE_FROM = 32
"""Average tokens of an adapter in a step from which blocks are large."""


class DeviceSlots:
    """One memory for all adapters on the GPU, filled by copies in the order of steps.

    A step in flight reads the adapters that it was launched with: a copy that overwrites an
    adapter follows on the same stream.
    """

    is_transposed = True

    def __init__(
        self,
        layout: AdapterLayout,
        state: AdapterState,
        data: Tensor,
        num_slots: int,
        max_rank: int,
        *,
        num_rows: int,
        is_deterministic: bool,
    ) -> None:
        """``data`` is the memory, in the model's dtype, all of it free. A step has at most
        ``num_rows`` decode rows.

        With ``is_deterministic`` a token's sum does not depend on the tokens beside it.
        """
        self._can_grow = not is_deterministic
        self._state = state
        self._device = data.device
        shape = (num_slots, len(layout.targets), 3)
        offsets = torch.zeros(shape, dtype=torch.int64, device=data.device)
        self._tables = AdapterTables(data, offsets)
        self._ranks = np.zeros(num_slots, dtype=np.int64)
        self._blocks: AdapterBlocks | None = None
        self._max_rank = max_rank
        # At most so many rows decode, and each sequence may have another adapter.
        size = num_rows * (SMALL_BLOCK + 1)
        self._fixed = torch.full((size,), -1, dtype=torch.int32, device=data.device)

    def load(self, slot: int, first: int, adapter: PackedAdapter) -> None:
        """Start the copy of an adapter to element ``first``, and note it in the tables."""
        size = len(adapter.data)
        self._tables.data.narrow(0, first, size).copy_(adapter.data, non_blocking=True)
        offsets = np.zeros(self._tables.offsets.shape[1:], dtype=np.int64)
        for one in adapter.matrices:
            offsets[one.target] = one.rank, first + one.a, first + one.b
        self._ranks[slot] = max((one.rank for one in adapter.matrices), default=1)
        self._tables.offsets[slot].copy_(self._send(offsets))

    def begin(self, slots_T: Int32Array, num_padded: int) -> None:
        """Group the next step's tokens by adapter; with ``num_padded`` for a captured step."""
        used, counts = np.unique(slots_T[slots_T >= 0], return_counts=True)
        is_large = self._can_grow and not num_padded and counts.mean() >= _LARGE_FROM
        size = LARGE_BLOCK if is_large else SMALL_BLOCK
        tokens, slots = token_blocks(slots_T, size)
        if num_padded:
            padding = num_padded - len(slots)
            tokens = np.pad(tokens, ((0, padding), (0, 0)), constant_values=-1)
            slots = np.pad(slots, (0, padding), constant_values=-1)
        packed = self._send(np.concatenate([tokens.reshape(-1), slots]))
        if num_padded:
            self._fixed[: len(packed)].copy_(packed)
            return
        max_rank = int(self._ranks[used].max())
        self._blocks = _blocks(packed, len(slots), size, max_rank)

    def begin_captured(self, num_tokens: int) -> None:
        """Let the next step read blocks of one token each, which `begin` fills later."""
        self._blocks = _blocks(self._fixed, num_tokens, SMALL_BLOCK, self._max_rank)

    @property
    def kernel_variants(self) -> Sequence[tuple[int, int]]:
        """See `Slots`. Empty if there is no memory for adapters."""
        if not len(self._tables.data):
            return ()
        return kernel_variants(self._max_rank, has_large_blocks=self._can_grow)

    def begin_unused(self, variant: tuple[int, int]) -> None:
        """Let the next step launch the kernels of a variant on a block without tokens."""
        size, rank = variant
        packed = torch.full((size + 1,), -1, dtype=torch.int32, device=self._device)
        self._blocks = _blocks(packed, 1, size, rank)

    def add(
        self, first_target: int, sizes: Sequence[int], x_TI: Tensor, output_TO: Tensor
    ) -> None:
        """Add the adapters' products to the outputs of these targets, in place."""
        assert self._blocks is not None
        add_adapters(x_TI, output_TO, self._tables, self._blocks, first_target, sizes)

    def attach(self, linear: ParallelLinear, targets: Sequence[Target]) -> None:
        """Let a layer add the products of adapters to its output."""
        linear.lora = _DeviceAddition(self, self._state, targets)

    def _send(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        """A small array on the device; the host does not wait."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _blocks(packed: Tensor, num_blocks: int, size: int, max_rank: int) -> AdapterBlocks:
    """Views of ``packed``: the tokens of all blocks, followed by the blocks' slots."""
    end = num_blocks * size
    tokens, slots = packed[:end].view(num_blocks, size), packed[end : end + num_blocks]
    return AdapterBlocks(tokens, slots, max_rank)


class _DeviceAddition:
    """Adds the products of `DeviceSlots` to one linear layer's output."""

    def __init__(
        self, slots: DeviceSlots, state: AdapterState, targets: Sequence[Target]
    ) -> None:
        self._slots = slots
        self._state = state
        self._first_target = targets[0].index
        self._sizes = tuple(target.outputs.size for target in targets)

    @property
    def is_active(self) -> bool:
        """Whether this step may have adapters in this layer."""
        return self._state.is_active

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output with each token's adapter added, in place."""
        if self._state.has_tokens:
            self._slots.add(self._first_target, self._sizes, x_TD, output_TE)
        return output_TE
