"""What a kernel needs to add LoRA adapters to a product, and the same sum by plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# Shapes: T tokens of the step, I inputs and O outputs, S slots, N targets of a model,
# G blocks of M tokens that share an adapter, D adapter size.


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """All adapters that the model can use: one piece of memory, and what lies where."""

    data: Tensor
    """The matrices, in the model's dtype."""

    places: Tensor
    """int64 [S, N, 3]: an adapter's size D for a target (0 for none), the first element of
    its first matrix [D, I], and of its second one [D, O]."""

    max_rank: int
    """Largest D."""


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """The tokens of one step that have adapters."""

    tokens: Tensor
    """int32 [G, M]; -1 where a block has no more."""

    slots: Tensor
    """int32 [G]: each block's adapter."""


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A part of a product's outputs that adapters add to; those of one product have
    numbers in a row."""

    index: int
    offset: int
    num_rows: int


def add_adapters(
    x_TI: Tensor,
    output_TO: Tensor,
    tables: AdapterTables,
    blocks: AdapterBlocks,
    targets: Sequence[AdapterTarget],
) -> None:
    """Add ``(x @ a.T) @ b`` of each token's adapter to the targets' outputs, in place.

    Sums are float32; ``x @ a.T`` and the output are each rounded once to the dtype of ``x``.
    """
    for tokens, slot in zip(blocks.tokens, blocks.slots.tolist(), strict=True):
        used = tokens[tokens >= 0].long()
        x = x_TI[used].float()
        for target in targets:
            rank, at_a, at_b = tables.places[slot, target.index].tolist()
            if not rank:
                continue
            a = tables.data[at_a : at_a + rank * x.shape[1]].view(rank, -1)
            b = tables.data[at_b : at_b + rank * target.num_rows].view(rank, -1)
            inner = (x @ a.float().T).to(x_TI.dtype).float()
            part = output_TO[:, target.offset : target.offset + target.num_rows]
            part[used] = (part[used].float() + inner @ b.float()).to(output_TO.dtype)
