"""FP8 products in Triton's interpreter: those of the plain twin.

The interpreter's rounding to FP8 differs from a GPU's. Inputs here are FP8 numbers times powers
of two, which need no rounding. Rounding is compared on a GPU (tests/gpu/test_fp8.py).
"""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import byte_reference
from trimaran.kernels.byte_products import FIXED_TILE, GpuByteProduct, stream_tile
from trimaran.kernels.cuda import byte_gemm
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, ByteWeight
from trimaran.kernels.tables.product_table import GemmShape, SkinnyShape
from trimaran.kernels.triton import byte_rows, elementwise, norm
from trimaran.kernels.triton.byte_gemm import Inputs, Tile, multiply_stream, multiply_tiles
from trimaran.kernels.triton.byte_inputs import (
    Choices,
    quantize_choices,
    quantize_groups,
    quantize_tokens,
)
from trimaran.kernels.triton.experts import sort_assignments

INPUTS = {
    "token": ByteInputs(),
    "powers": ByteInputs(has_power_scales=True),
    "bound": ByteInputs(bound=28.0),
    "static": ByteInputs(scale=torch.tensor(0.0625)),
}


def draw(*shape, seed=0):
    """Random FP8 numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 8).to(FP8)


def exact(rows, inner, peak_every):
    """Rows times powers of two, whose peaks make scales that are powers of two."""
    x = draw(rows, inner).float()
    x[:, ::peak_every] = 448.0
    return (x * 2.0 ** (torch.arange(rows) % 5 - 2)[:, None]).half()


def same(found, expected):
    """Whether two pairs of values and scales are equal to the bit."""
    assert found[0].view(torch.uint8).equal(expected[0].view(torch.uint8))
    scales = expected[1].reshape(-1)
    assert (
        found[1].reshape(-1).equal(scales if len(scales) > 1 else scales.expand(len(found[1])))
    )


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("inner", [96, 136])
def test_tokens_are_quantized_as_by_the_twin(name, inner):
    x = exact(5, inner + 8, 50)[:, :inner]
    inputs = INPUTS[name]
    x[4] = 0
    same(quantize_tokens(x, inputs), byte_reference.quantize_tokens(x, inputs))


@pytest.mark.parametrize(("inner", "first"), [(256, 0), (200, 0), (200, 48)])
def test_groups_are_quantized_as_by_the_twin(inner, first):
    x = exact(3, inner + 8, 16)[:, :inner]
    blocks = BlockMap(torch.empty(0), 64, first)
    found = quantize_groups(x, blocks, ByteInputs())
    same(found, byte_reference.quantize_groups(x, blocks, ByteInputs()))


def weights(outputs, inner, first=0, block=0):
    """A random weight, with a scale a row, or blocks of 48 rows and ``block`` columns."""
    generator = torch.Generator().manual_seed(outputs)
    if not block:
        return ByteWeight(draw(outputs, inner), torch.rand(outputs, generator=generator) / 4096)
    rows = (torch.arange(outputs) // 48).to(torch.int32)
    blocks = BlockMap.of(rows, block, first, rows.device)
    shape = (int(rows[-1]) + 1, len(blocks.groups(inner)))
    return ByteWeight(
        draw(outputs, inner), torch.rand(shape, generator=generator) / 4096, blocks
    )


CASES = [(0, 0), (0, 64), (24, 64)]


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize(("first", "block"), CASES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(1, 128, 256), (21, 136, 208)])
def test_products_are_those_of_the_twin(rows, outputs, inner, has_bias, first, block):
    weight = weights(outputs, inner, first, block)
    x = exact(rows, inner, 16)
    bias = torch.randn(outputs).half() if has_bias else None
    expected = byte_reference.ReferenceProduct(weight, ByteInputs())(x, bias)
    quantized = GpuByteProduct(weight, ByteInputs(), is_fixed=False).quantize(x)

    tiles = [
        multiply_tiles(quantized, weight, bias, x.dtype, Tile(16, columns, 32))
        for columns in (16, 32)
    ]
    streams = [
        multiply_stream(quantized, weight, bias, x.dtype, Tile(32, 32, 32, parts))
        for parts in (1, 3, 3)
    ]

    for found in (*tiles, *streams):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("is_fixed", [True, False])
@pytest.mark.parametrize("rows", [0, 3])
def test_the_product_of_a_weight_takes_any_number_of_rows(rows, is_fixed):
    weight = weights(192, 256)
    x = exact(rows, 256, 16)
    found = GpuByteProduct(weight, ByteInputs(), is_fixed=is_fixed)(x)
    expected = byte_reference.ReferenceProduct(weight, ByteInputs())(x)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-3)


def test_a_row_of_a_fixed_tile_shape_does_not_depend_on_other_rows():
    weight = weights(136, 208, 24, 64)
    x = exact(70, 208, 16)
    quantized = Inputs(*quantize_groups(x, weight.blocks, ByteInputs()))
    first = Inputs(quantized.values[:1], quantized.scales[:1])
    whole = multiply_tiles(quantized, weight, None, x.dtype, FIXED_TILE)
    assert multiply_tiles(first, weight, None, x.dtype, FIXED_TILE).equal(whole[:1])


@pytest.mark.parametrize(("outputs", "parts"), [(4096, 4), (28672, 1), (6144, 2)])
def test_products_with_few_outputs_are_split_between_more_programs(outputs, parts):
    assert stream_tile(1, outputs, 4096).parts == parts


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("width", [96, 136])
def test_norms_and_activations_make_the_bits_of_separate_kernels(name, width):
    inputs = INPUTS[name]
    draws = torch.Generator().manual_seed(1)
    x, residual, factor = (
        torch.randn(shape, generator=draws).half()
        for shape in ((5, width), (5, width), (width,))
    )
    gate_up = torch.randn(5, 2 * width, generator=draws).half()
    parts = torch.randn(3, 5, width, generator=draws)
    for addend in (x, parts):
        totals = residual.clone(), residual.clone()
        normed = norm.rms_norm(addend, factor, 1e-5, totals[0])
        found = byte_rows.rms_norm(addend, totals[1], factor, 1e-5, inputs)
        same(found[:2], quantize_tokens(normed, inputs))
        assert totals[0].equal(totals[1]) and found.dtype is torch.float16
    found = byte_rows.rms_norm(x, None, factor, 1e-5, inputs)
    same(found[:2], quantize_tokens(norm.rms_norm(x, factor, 1e-5), inputs))
    found = byte_rows.gated_activation(gate_up, "silu", inputs)
    same(found[:2], quantize_tokens(elementwise.silu_and_mul(gate_up), inputs))


@pytest.mark.parametrize("name", ["token", "bound", "static"])
def test_rows_in_groups_are_those_of_each_group(name):
    x, inputs = draw(5, 384).half(), INPUTS[name]
    rows = byte_reference.quantize_rows(x, inputs)
    assert rows.has_groups and rows.scales.shape == (3, 8) and rows.dtype is torch.float16
    parts = []
    for number, group in enumerate(x.split(128, 1)):
        values, scales = byte_reference.quantize_tokens(group, inputs)
        same((rows.values[:, 128 * number :][:, :128], rows.scales[number, :5]),
             (values, scales))  # fmt: skip
        parts.append(values.float() * scales)
    weight = ByteWeight(draw(16, 384), torch.rand(16))
    expected = torch.cat(parts, 1) @ weight.values.float().T * weight.scales
    torch.testing.assert_close(byte_reference.multiply_rows(rows, weight), expected)


@pytest.mark.parametrize(
    ("outputs", "columns", "max_tiles"), [(28672, 112, 2), (2048, 80, 1), (25344, 96, 2)]
)
def test_cuts_of_few_rows_keep_all_processors_busy(outputs, columns, max_tiles):
    cut = byte_gemm.gated_cut(64, outputs, 132)
    cut.check("gated")
    assert cut.columns == columns
    assert -(-outputs // columns) <= 132 * max_tiles


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32])
@pytest.mark.parametrize(
    ("outputs", "inner", "kind", "cut"),
    [
        (28672, 4096, "gated", (56, 1)), (12288, 4096, "gated", (48, 1)),
        (6144, 4096, "plain", (48, 1)), (96, 16, "plain", (8, 1)),
        (4096, 14336, "parts", (64, 2)), (544, 1552, "parts", (16, 3)),
        (16384, 4096, "parts", (64, 1)), (576, 14336, "parts", (40, 8)),
    ],
)  # fmt: skip
def test_few_rows_have_as_many_weights_on_each_processor(outputs, inner, kind, cut, rows):
    if kind == "gated":
        found = byte_gemm.gated_cut(rows, outputs, 132)
    else:
        chooser = byte_gemm.parts_cut if kind == "parts" else byte_gemm.whole_cut
        found = chooser(rows, outputs, inner, 132)
    assert isinstance(found, SkinnyShape)
    found.check(kind)
    assert found.tokens >= rows and (found.lines, found.split) == cut
    # Memory stays busy while a stage is multiplied.
    assert found.stages(kind) >= (4 if outputs > 96 else 2)


@pytest.mark.parametrize("rows", [1, 16, 32])
def test_a_processor_has_room_for_one_block_of_queries_and_one_of_attention(rows):
    cut = byte_gemm.whole_cut(rows, 6144, 4096, 132)
    of_processor, of_attention = 226, 99
    assert 2 * cut.shared_kib > of_processor >= cut.shared_kib + of_attention
    # A block with many weights has all of the memory.
    assert byte_gemm.whole_cut(rows, 6144, 14336, 132).shared_kib == 215


@pytest.mark.parametrize("cut", [(4, 32), (8, 36), (8, 136), (8, 32, 2), (64, 128, 1, 32)])
def test_tiles_of_few_rows_that_the_kernel_cannot_run_are_refused(cut):
    with pytest.raises(ValueError, match="take"):
        SkinnyShape(*cut).check("plain")


def test_gates_and_ups_of_many_rows_are_multiplied_by_two_blocks_if_these_keep_all_busy():
    cut = byte_gemm.gated_cut(256, 28672, 132)
    assert cut == GemmShape(128, 224, 1, 2, shares_weights=True, max_early=0)
    cut.check("gated")
    assert byte_gemm.gated_cut(129, 28672, 132) == cut
    assert byte_gemm.gated_cut(257, 28672, 132) is None
    assert byte_gemm.gated_cut(512, 28672, 132).columns == 224
    assert byte_gemm.gated_cut(1025, 28672, 132) is None
    assert byte_gemm.gated_cut(256, 4096, 132) is None


@pytest.mark.parametrize("rows", [33, 64, 65, 128])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (8192, 28672), (576, 1536)])
def test_blocks_of_parts_all_run_at_once(outputs, inner, rows):
    cut = byte_gemm.parts_cut(rows, outputs, inner, 132)
    assert cut is not None and cut.rows >= rows
    cut.check("parts")
    assert cut.split > 1 and -(-outputs // cut.columns) * cut.split <= 132


def test_few_rows_of_few_inputs_make_fewer_parts():
    assert byte_gemm.parts_cut(64, 4096, 4096, 132) == GemmShape(64, 64, 2)
    assert byte_gemm.parts_cut(64, 4096, 14336, 132) == GemmShape(64, 96, 3, max_early=8)
    assert byte_gemm.parts_cut(65, 4096, 4096, 132) == GemmShape(128, 96, 3)


def test_parts_of_more_rows_are_made_of_many_inputs_alone():
    assert byte_gemm.parts_cut(256, 4096, 14336, 132) == GemmShape(256, 96, 3)
    assert byte_gemm.parts_cut(256, 4096, 4096, 132) is None
    assert byte_gemm.parts_cut(257, 4096, 14336, 132) is None
    # So many tiles that they cannot be split, or too few inputs.
    assert byte_gemm.parts_cut(33, 16384, 4096, 132) is None
    assert byte_gemm.parts_cut(1, 4096, 512, 132) is None


@pytest.mark.parametrize(
    ("rows", "cut"),
    [
        (33, GemmShape(64, 48, max_stages=8, max_early=8)),
        (64, GemmShape(64, 48, max_stages=8, max_early=8)),
        (65, GemmShape(64, 128, max_early=8)),
        (128, GemmShape(64, 128, max_early=8)),
        (257, None),
    ],
)
def test_whole_products_of_more_rows_than_the_skinny_kernel_takes(rows, cut):
    assert byte_gemm.whole_cut(rows, 6144, 4096, 132) == cut


def test_a_product_of_64_rows_leaves_room_for_a_block_of_attention():
    of_processor, of_attention = 226 << 10, 99 << 10
    cut = byte_gemm.whole_cut(64, 6144, 4096, 132)
    assert cut.stages * cut.stage_bytes <= of_processor - of_attention


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(512, 6144, 192), (768, 4096, 192), (1024, 4096, 256), (900, 6144, 192),
     # Padding would keep the processors busy.
     (384, 6144, None), (600, 4096, None), (1025, 4096, None)],
)  # fmt: skip
def test_pairs_of_blocks_multiply_many_rows_if_these_fill_their_tiles(rows, outputs, columns):
    cut = byte_gemm.whole_cut(rows, outputs, 4096, 132)
    assert (cut and cut.columns) == columns
    if cut is not None:
        cut.check("plain")
        assert cut.shares_weights and cut in {
            byte_gemm.whole_cut(each, outputs, 4096, 132) for each in byte_gemm._TILES
        }


@pytest.mark.parametrize("outputs", [4096, 6144])
def test_whole_products_of_many_rows_have_tiles_that_all_run_at_once(outputs):
    cut = byte_gemm.whole_cut(200, outputs, 4096, 132)
    cut.check("plain")
    assert cut.rows == 128 and -(-outputs // cut.columns) * 2 == 128
    # Half of the processors would be idle, or some would have two tiles.
    assert byte_gemm.whole_cut(200, 2048, 4096, 132) is None
    assert byte_gemm.whole_cut(200, 16384, 4096, 132) is None


def test_whole_products_of_few_outputs_are_split():
    cut = byte_gemm.whole_cut(128, 4096, 14336, 132)
    assert cut == GemmShape(128, 64, 2)
    cut.check("plain")


@pytest.mark.parametrize("form", ["token", "powers", "bound"])
def test_tokens_are_quantized_in_the_order_of_their_experts(form):
    x, ids = exact(6, 96, 7), torch.tensor([[0, 3], [3, 1], [4, 0], [1, 3], [0, 1], [3, 2]])
    ids, first, count = ids.to(torch.int32), 1, 3
    order, totals, positions = sort_assignments(ids, count, first)
    choices = Choices(ids, first, count, (order, totals), of_tokens=True)

    values, scales = quantize_choices(x, choices, INPUTS[form])

    alone = quantize_tokens(x, INPUTS[form])
    own = 0
    for token, places in enumerate(positions.tolist()):
        for place in places:
            if place >= 0:
                expected = alone[0][token : token + 1], alone[1][token : token + 1]
                same((values[place : place + 1], scales[place : place + 1]), expected)
                own += 1
    # The experts 1 to 3 of this rank.
    assert own == int(((ids >= 1) & (ids <= 3)).sum()) == 8
