"""The adapters in a rank's memory, and their use in the model's linear layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trimaran.kernels.operators import Ops
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.layers.methods import AdapterState
from trimaran.worker.lora.adapter_messages import ArrivingAdapter, Row
from trimaran.worker.lora.formats import CheckedSource
from trimaran.worker.lora.layout import AdapterLayout, PackedAdapter, Target
from trimaran.worker.lora.token_slots import NO_SLOT, RowSlots, tokens_by_slot
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.steps.step_types import Int32Array, SchedulerOutput

# Shapes: T tokens of the step, I inputs and O outputs of a linear layer, D adapter size.

EXPECT, CHUNK, DROP, LOAD = "expect", "piece", "drop", "load"
"""An operation before a step: expect an adapter (number, rows), take a chunk of its weights
(number, bytes), forget the adapter (number), or load the adapter to the device (number, slot,
first element)."""


def num_chunk_bytes(ops: Iterable[Sequence[Any]]) -> int:
    """Bytes of adapter weights in these operations."""
    return sum(len(op[2]) for op in ops if op[0] == CHUNK)


class Slots(Protocol):
    """The adapters on the device, by slot, as the model's layers use them."""

    is_transposed: bool
    """Whether second matrices are stored transposed."""

    def load(self, slot: int, first: int, adapter: PackedAdapter) -> None:
        """Fill a slot; ``first`` is the adapter's first element in the device's memory."""
        ...

    def begin(self, slots_T: Int32Array, num_padded: int) -> None:
        """Take in the slots of the next step's tokens; ``num_padded`` is a captured step's
        size."""
        ...

    def begin_captured(self, num_tokens: int) -> None:
        """Prepare the capture of a step of so many tokens with any slots."""
        ...

    @property
    def kernel_variants(self) -> Sequence[tuple[int, int]]:
        """Tokens of a block and rank of each pair of kernels that a step may launch."""
        ...

    def begin_unused(self, variant: tuple[int, int]) -> None:
        """Let the next step launch the kernels of a variant on no token."""
        ...

    def attach(self, linear: ParallelLinear, targets: Sequence[Target]) -> None:
        """Let a layer add the products of adapters to its output."""
        ...


class AdapterStore:
    """One rank's adapters. Rank 0 decides where each adapter is kept; all ranks follow."""

    def __init__(
        self,
        model: CausalLM,
        layout: AdapterLayout,
        slots: Slots,
        num_rows: int,
        *,
        is_always_active: bool = False,
    ) -> None:
        self._layout = layout
        self._dtype = model.dtype
        self._slots = slots
        self._state = model.adapters
        self._state.is_active = self._is_always_active = is_always_active
        self._rows = RowSlots(num_rows)
        self._arriving: dict[int, ArrivingAdapter] = {}
        self._on_host: dict[int, Future[PackedAdapter]] = {}
        # The first adapter starts the thread.
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._slot_of: dict[int, int] = {}
        self._slots_T: Int32Array | None = None
        self._unused: tuple[int, int] | None = None
        for linear, targets in layout.linears:
            slots.attach(linear, targets)

    def carry_out(self, ops: Iterable[Sequence[Any]]) -> None:
        """Carry out rank 0's operations in order, before the next step."""
        for op in ops:
            self._carry_out(op)

    def begin_step(self, decision: SchedulerOutput) -> None:
        """Give the layers the adapters of a step's tokens."""
        if self._rows.is_used:
            for row in decision.finished_rows:
                self._rows.set(row, NO_SLOT)
        for new in decision.new_rows:
            if new.adapter_id:
                self._rows.set(new.row, self._slot_of[new.adapter_id])
        self._slots_T = self._rows.of_tokens(decision) if self._rows.is_used else None
        self._state.has_tokens = self._slots_T is not None or self._unused is not None
        self._state.is_active = self._is_always_active or self._state.has_tokens

    def prepare(self, num_padded: int) -> None:
        """Group the step's tokens by adapter; with ``num_padded`` in the fixed memory that a
        captured step of so many tokens reads."""
        if self._slots_T is not None:
            self._slots.begin(self._slots_T, num_padded)
        elif self._unused is not None:
            self._slots.begin_unused(self._unused)

    @contextmanager
    def captured(self, num_tokens: int) -> Iterator[None]:
        """A context in which layers add adapters to a step of so many tokens, with the slots
        that `prepare` leaves in fixed memory."""
        self._slots.begin_captured(num_tokens)
        self._state.has_tokens = self._state.is_active = True
        try:
            yield
        finally:
            self._state.has_tokens = False
            self._state.is_active = self._is_always_active

    @property
    def kernel_variants(self) -> Sequence[tuple[int, int]]:
        """See `Slots`."""
        return self._slots.kernel_variants

    @contextmanager
    def unused_variant(self, variant: tuple[int, int]) -> Iterator[None]:
        """A context in which steps without adapters launch a variant's kernels on no token."""
        self._unused = variant
        try:
            yield
        finally:
            self._unused = None
            self._state.has_tokens = False
            self._state.is_active = self._is_always_active

    def put(self, number: int, source: CheckedSource) -> None:
        """Pack this rank's shard of an adapter that was checked, in a thread."""
        self._on_host[number] = self._packer.submit(self._pack, source)

    def expect(self, number: int, rows: list[Row]) -> None:
        """Expect the chunks of an adapter that was checked."""
        self._arriving[number] = ArrivingAdapter(rows, self._dtype)
        self.take_chunk(number, b"")

    def take_chunk(self, number: int, chunk: bytes | memoryview) -> None:
        """Take the next chunk; the last chunk starts the packing."""
        arriving = self._arriving[number]
        arriving.add(chunk)
        if arriving.is_whole:
            self.put(number, self._arriving.pop(number))

    def wait_for(self, number: int) -> None:
        """Wait until this rank's shard of an adapter is packed."""
        self._on_host[number].result()

    def is_packed(self, number: int) -> bool:
        """Whether this rank's shard is packed, so that a load does not wait."""
        found = self._on_host.get(number)
        return found is not None and found.done()

    def close(self) -> None:
        """Stop the thread that packs adapters."""
        self._packer.shutdown(wait=False, cancel_futures=True)

    def _pack(self, source: CheckedSource) -> PackedAdapter:
        size = self._layout.size_of(source.ranks)
        matrices = source.matrices(self._layout)
        is_transposed = self._slots.is_transposed
        return self._layout.pack(matrices, size, self._dtype, is_transposed=is_transposed)

    def _carry_out(self, op: Sequence[Any]) -> None:
        kind, number, *rest = op
        if kind == EXPECT:
            self.expect(number, rest[0])
        elif kind == CHUNK:
            self.take_chunk(number, rest[0])
        elif kind == DROP:
            self._arriving.pop(number, None)
            self._on_host.pop(number, None)
            self._slot_of.pop(number, None)
        else:
            slot, first = rest
            self._slots.load(slot, first, self._on_host[number].result())
            self._slot_of[number] = slot


class HostSlots:
    """Adapters on a CPU, used in the memory in which they were packed.

    A token's result does not depend on other tokens: each product is computed row by row.
    """

    is_transposed = False

    def __init__(self, ops: Ops, state: AdapterState) -> None:
        self._ops = ops
        self._state = state
        self._matrices: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self._groups: list[tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]] = []

    def load(self, slot: int, first: int, adapter: PackedAdapter) -> None:
        """Record the matrices of a slot by target; ``first`` is unused on a CPU."""
        self._matrices[slot] = {}
        for one in adapter.matrices:
            inputs, outputs = one.shape
            a = adapter.data.narrow(0, one.a, one.rank * inputs).view(one.rank, inputs)
            b = adapter.data.narrow(0, one.b, one.rank * outputs).view(outputs, one.rank)
            self._matrices[slot][one.target] = a, b

    def begin(self, slots_T: Int32Array, num_padded: int) -> None:
        """Group the tokens of the next step by adapter; ``num_padded`` is unused on a CPU."""
        self._groups = [
            (torch.from_numpy(tokens.astype(np.int64)), self._matrices[slot])
            for slot, tokens in tokens_by_slot(slots_T)
        ]

    def begin_captured(self, num_tokens: int) -> None:
        """Refuse: steps on a CPU are not captured.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a step on the CPU is never captured")

    kernel_variants: Sequence[tuple[int, int]] = ()

    def begin_unused(self, variant: tuple[int, int]) -> None:
        """Refuse: no kernel is compiled for a step on a CPU.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("no kernel is compiled for adapters on the CPU")

    def attach(self, linear: ParallelLinear, targets: Sequence[Target]) -> None:
        """Let a layer add the products of adapters to its output."""
        linear.lora = _HostAddition(self, self._state, targets)

    def add(self, targets: Sequence[Target], x_TI: Tensor, output_TO: Tensor) -> None:
        """Add the adapters' products to the outputs of these targets, in place."""
        linear = self._ops.linear
        for tokens, matrices in self._groups:
            x = x_TI.index_select(0, tokens)
            for target in targets:
                found = matrices.get(target.index)
                if found is not None:
                    a_DI, b_OD = found
                    added = linear(linear(x, a_DI), b_OD)
                    part = output_TO.narrow(1, target.offset, target.outputs.size)
                    part.index_add_(0, tokens, added)


class _HostAddition:
    """Adds the products of `HostSlots` to one linear layer's output."""

    def __init__(
        self, slots: HostSlots, state: AdapterState, targets: Sequence[Target]
    ) -> None:
        self._slots = slots
        self._state = state
        self._targets = targets

    @property
    def is_active(self) -> bool:
        """Whether the step has tokens with adapters."""
        return self._state.is_active

    def apply(self, x_TD: Tensor, output_TE: Tensor) -> Tensor:
        """The output with each token's adapter added, in place."""
        self._slots.add(self._targets, x_TD, output_TE)
        return output_TE
