"""Inputs of the kernels that add LoRA adapters to a product, and the same sum in plain
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# Shapes: T tokens of the step, I inputs and O outputs, S slots, N targets of a model,
# G blocks of M tokens that share an adapter, D adapter size.


SMALL_BLOCK, LARGE_BLOCK = 16, 64
"""Tokens of a block, which reads its adapter once; a decode has few tokens of each adapter."""

MIN_RANK = 16
"""Smallest dim of a product on tensor cores, to which smaller ranks are padded."""


def kernel_variants(max_rank: int, *, has_large_blocks: bool) -> list[tuple[int, int]]:
    """Tokens of a block and padded rank of each kernel for adapters of up to ``max_rank``."""
    sizes = (SMALL_BLOCK, LARGE_BLOCK) if has_large_blocks else (SMALL_BLOCK,)
    num_ranks = max(0, -(-max_rank // MIN_RANK) - 1).bit_length() + 1
    return [(size, MIN_RANK << number) for size in sizes for number in range(num_ranks)]


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """All loaded adapters: one buffer, and the offsets of the matrices in it."""

    data: Tensor
    """The matrices, in the model's dtype."""

    offsets: Tensor
    """int64 [S, N, 3]: an adapter's size D for a target (0 for none), the first element of
    its first matrix [D, I], and of its second one [D, O]."""


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """The tokens of one step that have adapters."""

    tokens: Tensor
    """int32 [G, M]; padded with -1."""

    slots: Tensor
    """int32 [G]: each block's adapter; -1 for a block without tokens."""

    max_rank: int
    """Largest D of these adapters."""


def add_adapters(
    x_TI: Tensor,
    output_TO: Tensor,
    tables: AdapterTables,
    blocks: AdapterBlocks,
    first_target: int,
    sizes: Sequence[int],
) -> None:
    """Add ``(x @ a.T) @ b`` of each token's adapter to a product, in place.

    The product's outputs are the targets from number ``first_target`` on, concatenated, with
    these ``sizes``. Sums are float32; ``x @ a.T`` and the output are each rounded once to the
    dtype of ``x``.
    """
    for tokens, slot in zip(blocks.tokens, blocks.slots.tolist(), strict=True):
        if slot < 0:
            continue
        used = tokens[tokens >= 0].long()
        x = x_TI[used].float()
        end = 0
        for number, size in enumerate(sizes):
            part = output_TO[:, end : end + size]
            end += size
            rank, at_a, at_b = tables.offsets[slot, first_target + number].tolist()
            if not rank:
                continue
            a = tables.data[at_a : at_a + rank * x.shape[1]].view(rank, -1)
            b = tables.data[at_b : at_b + rank * size].view(rank, -1)
            inner = (x @ a.float().T).to(x_TI.dtype).float()
            part[used] = (part[used].float() + inner @ b.float()).to(output_TO.dtype)
