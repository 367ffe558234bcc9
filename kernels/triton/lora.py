"""LoRA adapters on a GPU: two grouped products a layer, for many adapters in one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from trimaran.kernels.adapters import MIN_RANK, AdapterBlocks, AdapterTables
from trimaran.kernels.triton.launch import Launcher, num_tiles, padded_size

# Shapes: T tokens of the step, I inputs and O outputs, G blocks of M tokens that share an
# adapter, P targets of the product, C chunks of the inputs, D adapter size.

_TILE_I = 128
_TILE_O = 256
_MAX_SUMS = 64 * 128
_MAX_CHUNKS = 8
"""Inputs of a chunk; chunks let few tokens keep many multiprocessors busy."""


@triton.jit(do_not_specialize=["num_targets", "first_target", "num_parts"])  # type: ignore[untyped-decorator,unused-ignore]
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x, data, offsets, tokens, slots, inner, width, row_stride, num_targets, first_target,
    num_parts, chunk_width, M: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (g * P + p, c): a chunk of ``x @ a.T`` of block g for target p."""
    block = tl.program_id(0) // num_parts
    part = tl.program_id(0) % num_parts
    chunk = tl.program_id(1)
    slot = tl.load(slots + block).to(tl.int64)
    place = offsets + (slot * num_targets + first_target + part) * 3
    rank = tl.load(place, mask=slot >= 0, other=0).to(tl.int32)
    at_a = tl.load(place + 1, mask=slot >= 0, other=0)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    token = tl.load(tokens + block * M + rows)
    source = x + tl.maximum(token, 0).to(tl.int64)[:, None] * row_stride
    matrix = data + at_a + dims[:, None].to(tl.int64) * width
    is_token, is_dim = (token >= 0)[:, None], (dims < rank)[:, None]
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if rank > 0:
        sums = tl.zeros((M, D), dtype=tl.float32)
        end = tl.minimum((chunk + 1) * chunk_width, width)
        for start in range(chunk * chunk_width, end, TILE):
            columns = start + tl.arange(0, TILE)[None, :]
            is_column = columns < end
            some_x = tl.load(source + columns, mask=is_token & is_column, other=0.0)
            some_a = tl.load(matrix + columns, mask=is_dim & is_column, other=0.0)
            sums = tl.dot(some_x, tl.trans(some_a), sums, input_precision="ieee")
        first = (chunk * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * M * D
        tl.store(inner + first + rows[:, None] * D + dims[None, :], sums)


@triton.jit(do_not_specialize=["num_targets", "first_target", "num_parts", "num_chunks"])  # type: ignore[untyped-decorator,unused-ignore]
def _expand_kernel(  # type: ignore[no-untyped-def]
    inner, data, offsets, tokens, slots, output, row_stride, num_targets, first_target,
    num_parts, num_chunks, size_0, size_1, size_2, M: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (i, g) adds to the i-th tile of the targets' outputs, for block g."""
    tile, block = tl.program_id(0), tl.program_id(1)
    end_0 = tl.cdiv(size_0, TILE)
    end_1 = end_0 + tl.cdiv(size_1, TILE)
    part = (tile >= end_0).to(tl.int32) + (tile >= end_1).to(tl.int32)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    offset = tl.where(part == 0, 0, tl.where(part == 1, size_0, size_0 + size_1))
    tile -= tl.where(part == 0, 0, tl.where(part == 1, end_0, end_1))
    slot = tl.load(slots + block).to(tl.int64)
    place = offsets + (slot * num_targets + first_target + part) * 3
    rank = tl.load(place, mask=slot >= 0, other=0).to(tl.int32)
    at_b = tl.load(place + 2, mask=slot >= 0, other=0)
    rows = tl.arange(0, M)
    dims = tl.arange(0, D)
    columns = tile * TILE + tl.arange(0, TILE)
    token = tl.load(tokens + block * M + rows)
    is_column = (columns < size)[None, :]
    is_dim = dims < rank
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    if rank > 0:
        matrix = data + at_b + dims[:, None].to(tl.int64) * size + columns[None, :]
        some_b = tl.load(matrix, mask=is_dim[:, None] & is_column, other=0.0)
        first = (block * num_parts + part).to(tl.int64) * M * D
        source = inner + first + rows[:, None] * D + dims[None, :]
        chunk_size = tl.num_programs(1).to(tl.int64) * num_parts * M * D
        sums = tl.load(source, mask=is_dim[None, :], other=0.0)
        for chunk in range(1, num_chunks):
            sums += tl.load(source + chunk * chunk_size, mask=is_dim[None, :], other=0.0)
        added = tl.dot(sums.to(some_b.dtype), some_b, input_precision="ieee")
        target = output + tl.maximum(token, 0).to(tl.int64)[:, None] * row_stride
        target += offset + columns[None, :]
        mask = (token >= 0)[:, None] & is_column
        before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, (before + added).to(output.dtype.element_ty), mask=mask)


_shrink = Launcher(_shrink_kernel)
_expand = Launcher(_expand_kernel)


def compile_adapters(
    device: torch.device, dtype: torch.dtype, block_size: int, max_rank: int
) -> None:
    """Compile the kernels of `add_adapters` for blocks of ``block_size`` tokens and one rank.

    They are those of layers whose sizes are multiples of 16. Safe in a thread.
    """
    tables = (dtype, torch.int64, torch.int32, torch.int32)
    size = 16
    _shrink.compile_ahead(
        device,
        (dtype, *tables, torch.float32, size, size, 3, 3, 3, _TILE_I),
        (block_size, max_rank, _TILE_I),
    )
    _expand.compile_ahead(
        device,
        (torch.float32, *tables, dtype, size, 3, 3, 3, 2, size, size, size),
        (block_size, max_rank, _expand_tile(block_size)),
    )


def _expand_tile(block_size: int) -> int:
    """Outputs of a tile, so few that a block's sums stay in registers."""
    return _TILE_O if block_size * _TILE_O <= _MAX_SUMS else _MAX_SUMS // block_size


def add_adapters(
    x_TI: Tensor,
    output_TO: Tensor,
    tables: AdapterTables,
    blocks: AdapterBlocks,
    first_target: int,
    sizes: Sequence[int],
) -> None:
    """As `adapters.add_adapters`, for up to three targets.

    ``x`` and the output are contiguous in their last dim. The order of summation depends on
    the width of ``x`` alone.
    """
    num_blocks, block_size = blocks.tokens.shape
    width, num_parts = x_TI.shape[1], len(sizes)
    rank = max(MIN_RANK, padded_size(blocks.max_rank))
    chunk_width = num_tiles(num_tiles(width, _TILE_I), _MAX_CHUNKS) * _TILE_I
    num_chunks = num_tiles(width, chunk_width)
    shape = (num_chunks, num_blocks, num_parts, block_size, rank)
    inner = torch.empty(shape, dtype=torch.float32, device=x_TI.device)
    data, offsets, tokens, slots = tables.data, tables.offsets, blocks.tokens, blocks.slots
    num_targets = offsets.shape[1]
    _shrink(
        (num_blocks * num_parts, num_chunks),
        (
            x_TI, data, offsets, tokens, slots, inner, width, x_TI.stride(0), num_targets,
            first_target, num_parts, chunk_width,
        ),
        (block_size, rank, _TILE_I),
    )  # fmt: skip
    size_0, size_1, size_2 = (*sizes, 0, 0)[:3]
    tile = _expand_tile(block_size)
    num_outputs = sum(num_tiles(size, tile) for size in sizes)
    _expand(
        (num_outputs, num_blocks),
        (
            inner, data, offsets, tokens, slots, output_TO, output_TO.stride(0), num_targets,
            first_target, num_parts, num_chunks, size_0, size_1, size_2,
        ),
        (block_size, rank, tile),
    )  # fmt: skip
