"""FP8 products of few rows and INT8 products on Hopper: the cut of each, and its kernel."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError
from trimaran.kernels.compilations import hooks
from trimaran.kernels.cuda import paired_cuts
from trimaran.kernels.cuda.build import check_compiler
from trimaran.kernels.cuda.hopper_gemm import HopperGemm
from trimaran.kernels.cuda.skinny_gemm import SkinnyGemm, compile_choice
from trimaran.kernels.quantized import GROUP, INT8, ByteRows, ByteWeight
from trimaran.kernels.tables.product_table import Bytes, GemmShape, Kind, SkinnyShape

# Shapes: T tokens, D inner width, E gate and up.

MAX_SKINNY_ROWS = 32
"""Rows up to which blocks that have rows of the weight as the left operand are faster."""

MAX_ROWS = 128
"""Rows up to which this kernel is faster than the library for every product of FP8."""

MAX_MANY_ROWS = 256
"""The same for parts of many inputs, and for gates and ups that keep all processors busy."""

MAX_PAIRED_ROWS = 1024
"""Rows of FP8 up to which tiles of `paired_cuts` are faster than the library if they keep the
processors busy. INT8 has no such library: its tiles have no such limit."""

_TILES = (8, 16, 32, 64, 128, 256, 512, 768, 1024)
"""Numbers of rows between which the choice is the same, or another kernel."""

_FEW_ROWS = 64
"""Rows of the smallest tile."""

_MANY_INPUTS = 8192
"""Inputs from which parts of up to `MAX_MANY_ROWS` rows are faster than the library."""

_MULTIPLE = 16
_GATED_COLUMNS = (80, 96, 112)
_MANY_GATED = GemmShape(128, 224, 1, 2, 16, 0, shares_weights=True)
"""The tile of gated products of more than `MAX_ROWS` rows: two blocks share its weights."""

_EARLY = 8
"""Tiles of weights in flight before the rows are ready: 2 % of a step of 64 rows less."""

_MIN_BUSY = 0.9
"""Share of the processors' time that tiles fill, from which `_MANY_GATED` is faster."""

_MIN_UTILIZATION = 0.82
"""Utilization from which tiles of `paired_cuts` are faster. On an H200 768 rows by 4,096
outputs of 14,336 values take 62 us and by the library 75, 512 by 6,144 of 4,096 21.4 and 25.8,
512 by 28,672 of 4,096 with SwiGLU and quantization 95.7 and 98.2, 512 by 37,888 of 3,584 113
and 127."""

_COLUMNS = (48, 64, 80, 96, 112)
_MANY_COLUMNS = (64, 80, 96, 112)
_PARTS_COLUMNS = (96, 112, 128)
_FEW_INPUTS_COLUMNS = (64, *_PARTS_COLUMNS)
_EARLY_PARTS = {96: 8}
"""Tiles of parts in flight before up to 64 rows are ready, by their columns: 1 % of a layer of
64 rows less than with 64 KiB."""

_MAX_HALF_ROWS, _HALF_KIB = 16, 106
_MORE_THAN_HALF_KIB = 124
"""Shared memory that leaves room for a block of another kernel, and for none of the same: all
processors get a block of the product."""

_BESIDE_ATTENTION_BYTES = 115 << 10
"""Shared memory of a ring that leaves room for a block of attention, which then reads its first
keys while the product still runs: 1 % of a layer of 64 rows."""

_MIN_HALVES_BUSY = 0.7
"""Share of the processors for which 65 to 128 rows have two tiles of 64 rows: 2 % of a layer of
128 rows less than with one tile of 128."""

_FEW_BYTES = 200 << 10
"""Weights of a block up to which blocks of other kernels should run beside it."""

_MAX_SPLIT = 8
_MIN_INPUTS = 512
"""Inputs of a part that outweigh the start of a block."""


def can_multiply(weight: ByteWeight) -> bool:
    """Whether the kernel takes this weight, and can be compiled here."""
    values = weight.values
    if weight.blocks is not None or values.device.type != "cuda":
        return False
    outputs, inner = values.shape
    if outputs % (2 * _MULTIPLE) or inner % _MULTIPLE:
        return False
    if torch.cuda.get_device_capability(values.device) != (9, 0):
        return False
    try:
        check_compiler()
    except KernelsUnavailableError:
        return False
    return True


Cut = GemmShape | SkinnyShape


@functools.lru_cache(maxsize=1024)
def gated_cut(num_rows: int, outputs: int, processors: int) -> Cut | None:
    """The cut by which the processor that reads the most weights reads the fewest; None if
    another kernel is faster.

    On an H200 256 rows by 28,672 outputs of 4,096 values, with the quantization of the results,
    take up to 5 us of 70 less than the library and SwiGLU.
    """
    if num_rows < 1:
        return None
    if num_rows <= MAX_SKINNY_ROWS:
        return SkinnyShape.of_rows(num_rows, SkinnyShape.even_lines(outputs // 2, processors))
    if num_rows > MAX_MANY_ROWS:
        return _paired_cut(num_rows, outputs, processors, "gated")
    if num_rows > MAX_ROWS:
        clusters = processors // _MANY_GATED.sharing
        tiles = -(-outputs // _MANY_GATED.columns)
        waves = -(-tiles // clusters) if clusters else 0
        is_busy = waves > 0 and tiles >= _MIN_BUSY * waves * clusters
        return _MANY_GATED if is_busy else None

    def max_columns(columns: int) -> int:
        tiles = -(-outputs // columns)
        return -(-tiles // processors) * columns

    columns = min(reversed(_GATED_COLUMNS), key=max_columns)
    return GemmShape(_tile_rows(num_rows), columns, max_early=_EARLY)


@functools.lru_cache(maxsize=1024)
def parts_cut(num_rows: int, outputs: int, inner: int, processors: int) -> Cut | None:
    """The cut of a product whose parts the next kernel adds up; None if another kernel is
    faster.

    All blocks run at once, and the weights of each are the fewest. Measured on an H200 for
    4,096 outputs of 4,096 and of 14,336 inputs, tiles of 96 columns are the fastest above 16
    rows: 1.3 to 2.5 us of 11 to 24 faster than Triton's product of up to 64 rows, and 5 and 16
    us of 20 and 42 than the library's of 128. Of 4,096 inputs and up to 64 rows, tiles of 64
    columns have fewer parts for the norm to add up: 1 % of a layer less.
    """
    if 0 < num_rows <= MAX_SKINNY_ROWS:
        return _skinny_parts(num_rows, outputs, inner, processors)
    is_many = MAX_ROWS < num_rows <= MAX_MANY_ROWS and inner >= _MANY_INPUTS
    if not 0 < num_rows <= MAX_ROWS and not is_many:
        return None
    is_few = num_rows <= _FEW_ROWS
    widths = _FEW_INPUTS_COLUMNS if is_few and inner < _MANY_INPUTS else _PARTS_COLUMNS
    cuts = []
    for columns in widths:
        split = min(_MAX_SPLIT, processors // -(-outputs // columns), inner // _MIN_INPUTS)
        if split > 1:
            cuts.append((columns / split * (1 if columns <= 96 else 1.2), columns, split))
    if not cuts:
        return None
    _, columns, split = min(cuts)
    early = _EARLY_PARTS.get(columns, 0) if is_few else 0
    return GemmShape(_tile_rows(num_rows), columns, split, max_early=early)


def _skinny_parts(
    num_rows: int, outputs: int, inner: int, processors: int
) -> SkinnyShape | None:
    if inner < 2 * _MIN_INPUTS:
        return None
    most = min(_MAX_SPLIT, inner // _MIN_INPUTS)
    cut = SkinnyShape.even_parts(outputs, processors, most)
    shape = SkinnyShape.of_rows(num_rows, *cut)
    return _beside_others(shape, inner, _HALF_KIB) if num_rows <= _MAX_HALF_ROWS else shape


def _beside_others(shape: SkinnyShape, inner: int, shared_kib: int) -> SkinnyShape:
    """The shape with room for other blocks beside its own, if these have few weights: attention
    and the product behind it begin earlier."""
    has_few = shape.lines * (inner // shape.split) <= _FEW_BYTES
    return replace(shape, shared_kib=shared_kib) if has_few else shape


@functools.lru_cache(maxsize=1024)
def whole_cut(
    num_rows: int, outputs: int, inner: int, processors: int, *, is_split: bool = True
) -> Cut | None:
    """The cut of a product that is stored whole; None if another kernel is faster. Unless
    ``is_split`` no blocks share the inputs, whose sums they add up in float32.

    On an H200 64 and 128 rows by 6,144 outputs of 4,096 values take 9.4 and 10.5 us, by the
    library 14.1 and 14.5, and 64 by Triton 12.2; a layer of 64 rows is 3 % shorter than with
    Triton's. A graph of layers of the 8B shape is 3 % shorter for 1 row with
    `_MORE_THAN_HALF_KIB` than with `_HALF_KIB`, and 4 % for 16 rows than with all of the shared
    memory.
    """
    if num_rows < 1:
        return None
    if num_rows <= MAX_SKINNY_ROWS:
        shape = SkinnyShape.of_rows(num_rows, SkinnyShape.even_lines(outputs, processors))
        return _beside_others(shape, inner, _MORE_THAN_HALF_KIB)
    if num_rows > MAX_MANY_ROWS:
        return _paired_cut(num_rows, outputs, processors, "plain")
    if num_rows > MAX_ROWS:
        return _many_cut(outputs, processors)
    halves = 2 * -(-outputs // 128)
    if num_rows > _FEW_ROWS and _MIN_HALVES_BUSY * processors <= halves <= processors:
        return GemmShape(_FEW_ROWS, 128, max_early=_EARLY)
    # Columns whose weights take as long as the exchange of sums.
    exchange = 8 if num_rows > _FEW_ROWS else 16 * 4096 // inner
    columns, split = _fewest_weights(outputs, inner, processors, 3 if is_split else 1, exchange)
    cut = GemmShape(_tile_rows(num_rows), columns, split)
    if num_rows > _FEW_ROWS:
        return cut
    stages = max(4, _BESIDE_ATTENTION_BYTES // cut.stage_bytes)
    return replace(cut, max_stages=stages, max_early=_EARLY)


def _fewest_weights(
    outputs: int, inner: int, processors: int, max_split: int, exchange: int
) -> tuple[int, int]:
    """The columns of a tile, and the blocks that share its inputs, by which a processor reads
    the fewest weights. An exchange of sums takes as long as the weights of ``exchange``
    columns."""

    def weights_of_a_processor(cut: tuple[int, int]) -> float:
        columns, split = cut
        tiles = -(-outputs // columns)
        weights = -(-tiles * split // processors) * columns / split
        return weights if split == 1 else weights + exchange

    splits = [
        split for split in range(1, max_split + 1) if split == 1 or inner >= split * _MIN_INPUTS
    ]
    cuts = [(columns, split) for split in splits for columns in _COLUMNS]
    return min(cuts, key=weights_of_a_processor)


def _many_cut(outputs: int, processors: int) -> GemmShape | None:
    """Tiles of 128 rows that all run at once, if these keep the processors busy.

    With the gated products, such products of 6,144 and 4,096 outputs make a step of 256 rows of
    the 8B shape 1.5 to 2 % shorter on an H200: the library's kernels start when the kernels
    before them have ended.
    """
    for columns in _MANY_COLUMNS:
        tiles = 2 * -(-outputs // columns)
        if _MIN_BUSY * processors <= tiles <= processors:
            sharing = 2 if columns == _MANY_COLUMNS[0] else 1
            return GemmShape(128, columns, 1, sharing, shares_weights=sharing > 1)
    return None


def _paired_cut(num_rows: int, outputs: int, processors: int, kind: Kind) -> GemmShape | None:
    """Tiles of many rows that pairs of blocks share, if these keep the processors busy."""
    if num_rows > MAX_PAIRED_ROWS:
        return None
    tile = paired_cuts.choose(num_rows, outputs, processors, kind)
    utilization = paired_cuts.utilization(num_rows, outputs, processors, tile)
    return tile if utilization >= _MIN_UTILIZATION else None


def _tile_rows(num_rows: int) -> int:
    return next(rows for rows in (64, 128, 256) if num_rows <= rows)


class _Product(NamedTuple):
    """A product by a weight, by what its cuts depend on."""

    size: torch.Size
    processors: int
    kind: Kind
    numbers: Bytes
    is_fixed: bool

    @classmethod
    def of(cls, weight: ByteWeight, kind: Kind, *, is_fixed: bool = False) -> _Product:
        """The product by a weight. If ``is_fixed`` all cuts make the same bits, which only
        those of INT8 can."""
        numbers: Bytes = "INT8" if weight.values.dtype is INT8 else "FP8"
        return cls(weight.values.shape, _processors(weight), kind, numbers, is_fixed)


@functools.lru_cache(maxsize=4096)
def _cut_of(num_rows: int, product: _Product) -> Cut | None:
    """The cut of a product; None if another kernel is faster."""
    (outputs, inner), processors, kind, numbers, is_fixed = product
    is_int8 = numbers == "INT8"
    assert is_int8 or not is_fixed, "sums of FP8 depend on the cut"
    if kind == "parts":
        return None if is_fixed else parts_cut(num_rows, outputs, inner, processors)
    if is_int8 and num_rows > MAX_ROWS:
        return paired_cuts.choose(num_rows, outputs, processors, kind)
    if kind == "gated":
        return gated_cut(num_rows, outputs, processors)
    return whole_cut(num_rows, outputs, inner, processors, is_split=not is_fixed)


def can_gate(num_rows: int, weight: ByteWeight) -> bool:
    """Whether `multiply_gated` takes so many rows; see `gated_cut`."""
    return _cut_of(num_rows, _Product.of(weight, "gated")) is not None


def multiply_gated(x: ByteRows, weight: ByteWeight) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)`` [T, E / 2] of rows that it `can_gate`, by a weight that
    `can_multiply` allows. Safe under CUDA graph capture, as all of this file.

    With the quantization of rows, products of 64 and 128 rows with 28,672 outputs of 4,096
    values take 30.9 and 37.6 us on an H200; Triton's product and SwiGLU of 64 rows take 37.4,
    the library's and SwiGLU of 128 rows 44.0. The bytes take 28 at 4.2 TB/s.
    """
    return _multiply(x, weight, _Product.of(weight, "gated"))


def takes_groups(num_rows: int, weight: ByteWeight) -> bool:
    """Whether `multiply_parts` takes so many rows with a scale for each group of inputs, or
    `multiply` where there are no parts."""
    if weight.values.shape[1] % GROUP or num_rows > MAX_MANY_ROWS:
        return False
    return can_make_parts(num_rows, weight) or can_multiply_whole(num_rows, weight)


def can_make_parts(num_rows: int, weight: ByteWeight) -> bool:
    """Whether `multiply_parts` takes so many rows; see `parts_cut`."""
    return _cut_of(num_rows, _Product.of(weight, "parts")) is not None


def multiply_parts(x: ByteRows, weight: ByteWeight) -> Tensor:
    """Float32 [S, T, E] whose sum over S is ``x @ weight.T``, if it `can_make_parts`; of rows
    with groups if it `takes_groups`."""
    return _multiply(x, weight, _Product.of(weight, "parts"))


def can_multiply_whole(num_rows: int, weight: ByteWeight) -> bool:
    """Whether `multiply` takes so many rows; see `whole_cut`."""
    return _cut_of(num_rows, _Product.of(weight, "plain")) is not None


def multiply(x: ByteRows, weight: ByteWeight, *, is_fixed: bool = False) -> Tensor:
    """``x @ weight.T`` [T, E], if it `can_multiply_whole`. With ``is_fixed``, for INT8 alone, a
    row's result depends neither on the other rows nor on their number."""
    return _multiply(x, weight, _Product.of(weight, "plain", is_fixed=is_fixed))


def _multiply(x: ByteRows, weight: ByteWeight, product: _Product) -> Tensor:
    cut = _cut_of(x.values.shape[0], product)
    assert cut is not None, "another kernel multiplies so many rows"
    _compile(product, x.dtype, x.has_groups)
    kernel = _kernel(cut, product.kind, x.dtype, x.values.device, product.numbers, x.has_groups)
    return kernel.multiply_bytes(x.values, x.scales, weight.values, weight.scales)


@functools.lru_cache(maxsize=1024)
def _compile(product: _Product, dtype: torch.dtype, has_groups: bool) -> None:
    """Compile the kernels of all numbers of rows in parallel, at a weight's first use."""
    size, _, kind, numbers, _ = product
    rows = (*_TILES, *paired_cuts.NUMBERS_OF_ROWS) if numbers == "INT8" else _TILES
    cuts = {cut for each in rows if (cut := _cut_of(each, product)) is not None}
    compile_one = functools.partial(
        compile_choice, dtype=dtype, kind=kind, numbers=numbers, has_groups=has_groups
    )
    with hooks.waiting(f"{numbers} products by {size[0]} x {size[1]}"):
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(compile_one, cuts))


@functools.lru_cache(maxsize=256)
def _kernel(
    cut: Cut,
    kind: Kind,
    dtype: torch.dtype,
    device: torch.device,
    numbers: Bytes,
    has_groups: bool,
) -> HopperGemm | SkinnyGemm:
    if isinstance(cut, SkinnyShape):
        return SkinnyGemm(cut, dtype, device, kind, numbers=numbers, has_groups=has_groups)
    return HopperGemm(cut, dtype, device, kind, numbers=numbers, has_groups=has_groups)


def _processors(weight: ByteWeight) -> int:
    return _num_processors(weight.values.device)


@functools.lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
