"""FP8 on a GPU: kernels against the plain twin, and whole models against the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from tests.unit.worker.quantization import checkpoints
from trimaran.kernels import byte_reference
from trimaran.kernels.byte_products import (
    FIXED_TILE,
    GpuByteProduct,
    can_use_library,
    multiply_by_library,
    stream_tile,
)
from trimaran.kernels.cuda.skinny_gemm import SkinnyGemm
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.quantized import FP8, BlockMap, ByteInputs, ByteRows, ByteWeight
from trimaran.kernels.reference import silu_and_mul
from trimaran.kernels.tables.product_table import SkinnyShape
from trimaran.kernels.triton import elementwise, norm
from trimaran.kernels.triton.byte_gemm import Inputs, Tile, multiply_stream, multiply_tiles
from trimaran.kernels.triton.byte_inputs import quantize_groups, quantize_tokens
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ShardPosition

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SIZES = [(1, 4096, 4096), (7, 6144, 4096), (16, 4096, 14336), (64, 28672, 4096), (33, 200, 272)]
MANY = [(65, 4096, 4096), (300, 1032, 528), (1024, 6144, 4096)]
TOLERANCE = 4e-3
"""Norm of the deviation relative to the result's: rounding to bf16 makes 1.6e-3, and Hopper's
own sums of 22 bits add to it."""
GATED_TOLERANCE = 6e-3
"""That of a function of two products."""


def drawn(rows, inner, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn((rows, inner), generator=generator, device=DEVICE)
    # Tokens and channels of very different sizes, as in real models.
    spread = torch.randn(inner, generator=generator, device=DEVICE).exp()
    return (x * spread * torch.logspace(-2, 2, rows, device=DEVICE)[:, None]).to(dtype)


def weight_of(outputs, inner, block=0, first=0):
    generator = torch.Generator(DEVICE).manual_seed(outputs + inner)
    values = torch.randn((outputs, inner), generator=generator, device=DEVICE).mul(40).to(FP8)
    if not block:
        scales = torch.rand(outputs, generator=generator, device=DEVICE) / 64
        return ByteWeight(values, scales)
    rows = (torch.arange(outputs, device=DEVICE) // block).to(torch.int32)
    blocks = BlockMap(rows, block, first)
    shape = (int(rows[-1]) + 1, len(blocks.groups(inner)))
    scales = torch.rand(shape, generator=generator, device=DEVICE) / 64
    return ByteWeight(values, scales, blocks)


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def expected_of(x, weight, inputs, bias=None):
    return byte_reference.ReferenceProduct(weight, inputs)(x.float(), bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["token", "powers", "bound", "static"])
@pytest.mark.parametrize(("rows", "inner"), [(1, 4096), (100, 14336), (3, 28672), (5, 200)])
def test_per_token_quantization_has_the_bits_of_the_torch_twin(rows, inner, kind, dtype):
    inputs = {
        "token": ByteInputs(),
        "powers": ByteInputs(has_power_scales=True),
        "bound": ByteInputs(bound=3.0),
        "static": ByteInputs(scale=torch.tensor(0.01, device=DEVICE)),
    }[kind]
    x = drawn(rows, inner + 8, dtype)[:, :inner]
    values, scales = quantize_tokens(x, inputs)
    expected, expected_scales = byte_reference.quantize_tokens(x, inputs)
    assert scales.equal(expected_scales.reshape(-1).expand(rows))
    assert values.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.parametrize("has_powers", [True, False])
@pytest.mark.parametrize(
    ("rows", "inner", "first"), [(1, 4096, 0), (100, 14336, 0), (7, 272, 48)]
)
def test_per_group_quantization_has_the_bits_of_the_torch_twin(rows, inner, first, has_powers):
    x, blocks = drawn(rows, inner), BlockMap(torch.empty(0), 128, first)
    inputs = ByteInputs(has_power_scales=has_powers)
    values, scales = quantize_groups(x, blocks, inputs)
    expected, expected_scales = byte_reference.quantize_groups(x, blocks, inputs)
    assert scales.equal(expected_scales)
    assert values.view(torch.uint8).equal(expected.view(torch.uint8))


CASES = [(0, 0), (128, 0), (128, 48), (64, 0)]


@pytest.mark.parametrize(("block", "first"), CASES)
@pytest.mark.parametrize(("rows", "outputs", "inner"), SIZES)
def test_products_of_few_rows_are_those_of_the_torch_twin(rows, outputs, inner, block, first):
    weight, x = weight_of(outputs, inner, block, first), drawn(rows, inner)
    bias = torch.randn(outputs, device=DEVICE, dtype=x.dtype)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    quantized, expected = product.quantize(x), expected_of(x, weight, ByteInputs(), bias)
    chosen = stream_tile(rows, outputs, inner)
    for tile in (chosen, chosen._replace(parts=1), chosen._replace(parts=5)):
        for _ in range(2):
            # Counters are left at zero for the next product.
            found = multiply_stream(quantized, weight, bias, x.dtype, tile)
            assert error(found, expected) < TOLERANCE, tile
    assert error(product(x, bias), expected) < TOLERANCE


@pytest.mark.parametrize(("block", "first"), CASES)
@pytest.mark.parametrize(("rows", "outputs", "inner"), [*SIZES[:2], *MANY])
def test_products_of_many_rows_are_those_of_the_torch_twin(rows, outputs, inner, block, first):
    weight, x = weight_of(outputs, inner, block, first), drawn(rows, inner)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    quantized, expected = product.quantize(x), expected_of(x, weight, ByteInputs())
    for tile in (Tile(128, 128, 128, warps=8), FIXED_TILE, Tile(16, 64, 128)):
        found = multiply_tiles(quantized, weight, None, x.dtype, tile)
        assert error(found, expected) < TOLERANCE, tile
    assert error(product(x), expected) < TOLERANCE


@pytest.mark.parametrize(("rows", "outputs", "inner"), [*MANY[::2], (8192, 4096, 14336)])
def test_the_product_of_the_library_is_that_of_the_torch_twin(rows, outputs, inner):
    weight, x = weight_of(outputs, inner), drawn(rows, inner)
    assert can_use_library(weight)
    bias = torch.randn(outputs, device=DEVICE, dtype=x.dtype)
    found = multiply_by_library(Inputs(*quantize_tokens(x, ByteInputs())), weight, bias)
    assert error(found, expected_of(x, weight, ByteInputs(), bias)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 33, 64, 65, 128])
@pytest.mark.parametrize(
    ("outputs", "inner"), [(4096, 4096), (28672, 4096), (4096, 14336), (544, 144), (96, 16)]
)
def test_gated_products_are_those_of_the_torch_twin(rows, outputs, inner, dtype):
    weight, x = weight_of(outputs, inner), drawn(rows, inner, dtype)
    # The products of gates and ups are in the range of float16 in every row.
    x = x / x.abs().amax(1, keepdim=True)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    whole = byte_reference.ReferenceProduct(weight, ByteInputs())(x.float())
    gated = product.gated(x)
    assert gated is not None and gated.dtype is dtype
    assert error(gated, silu_and_mul(whole)) < GATED_TOLERANCE
    factor = torch.ones(inner, device=DEVICE).to(dtype)
    normed = norm.rms_norm(x, factor, 1.0)
    quantized = ByteRows(*quantize_tokens(normed, ByteInputs()), dtype)
    assert product.gated(quantized).equal(product.gated(normed))
    assert product(quantized).equal(product(normed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 32, 33, 64, 65, 128, 129, 256, 300, 500, 1024])
@pytest.mark.parametrize(
    ("outputs", "inner"), [(4096, 4096), (6144, 4096), (4096, 14336), (544, 1552), (96, 16)]
)
def test_whole_products_and_parts_are_those_of_the_torch_twin(rows, outputs, inner, dtype):
    weight, x = weight_of(outputs, inner), drawn(rows, inner, dtype)
    # The products are in the range of float16.
    x = x / x.abs().amax(1, keepdim=True)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    expected = expected_of(x, weight, ByteInputs())
    whole, parts = product(x), product.parts(x)
    assert whole.dtype is dtype
    assert error(whole, expected) < TOLERANCE
    if parts is not None:
        assert parts.dtype is torch.float32 and parts.shape[1:] == (rows, outputs)
        assert error(parts.sum(0), expected) < TOLERANCE
    # Few inputs are not worth a split.
    assert (parts is None) == (rows > (256 if inner >= 8192 else 128) or inner < 1024)


@pytest.mark.parametrize("rows", [129, 160, 256, 512, 1000])
def test_gated_products_of_many_rows_are_those_of_the_torch_twin(rows):
    weight, x = weight_of(28672, 4096), drawn(rows, 4096)
    x = x / x.abs().amax(1, keepdim=True)
    gated = GpuByteProduct(weight, ByteInputs(), is_fixed=False).gated(x)
    assert gated is not None
    whole = byte_reference.ReferenceProduct(weight, ByteInputs())(x.float())
    assert error(gated, silu_and_mul(whole)) < GATED_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inner"), [(3072, 2048), (2048, 8192), (4096, 1032), (96, 8)]
)
@pytest.mark.parametrize("rows", [1, 8, 9, 20, 64])
def test_tiles_whose_left_operand_is_the_weight_are_those_of_torch(rows, outputs, inner, dtype):
    x, weight = (0.1 * drawn(size, inner, dtype) for size in (rows, outputs))
    x, weight = (each / each.abs().amax(1, keepdim=True) for each in (x, weight))
    exact, half = x.double() @ weight.double().T, outputs // 2
    gated = torch.nn.functional.silu(exact[:, :half]) * exact[:, half:]
    split = 3 if inner > 1000 else 1
    for kind, lines, parts in (("plain", 24, 1), ("parts", 16, split), ("gated", 64, 1)):
        shape = SkinnyShape.of_rows(rows, lines, parts)
        found = SkinnyGemm(shape, dtype, DEVICE, kind)(x, weight)
        found = found.double().sum(0) if kind == "parts" else found
        assert error(found, gated if kind == "gated" else exact) < TOLERANCE, kind


def test_products_of_float32_are_float32():
    weight, x = weight_of(4096, 4096), drawn(16, 4096, torch.float32)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    assert product.gated(x) is None and product.parts(x) is None
    assert error(product(x), expected_of(x, weight, ByteInputs())) < TOLERANCE


@pytest.mark.parametrize("rows", [0, 129])
def test_other_numbers_of_rows_have_no_gated_products(rows):
    product = GpuByteProduct(weight_of(256, 256), ByteInputs(), is_fixed=False)
    x = drawn(rows, 256)
    assert product.gated(x) is None


@pytest.mark.parametrize("kind", ["token", "powers", "bound", "static"])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (300, 4096), (5, 200), (64, 14336)])
def test_norms_and_activations_make_the_rows_of_separate_kernels(rows, width, kind):
    inputs = {
        "token": ByteInputs(),
        "powers": ByteInputs(has_power_scales=True),
        "bound": ByteInputs(bound=0.5),
        "static": ByteInputs(scale=torch.tensor(0.01, device=DEVICE)),
    }[kind]
    product = GpuByteProduct(weight_of(64, width), inputs, is_fixed=True)
    x, residual = drawn(rows, width), drawn(rows, width, seed=1)
    parts, gate_up = drawn(3 * rows, width, torch.float32), drawn(rows, 2 * width)
    factor = drawn(1, width)[0]
    for addend in (x, parts.view(3, rows, width)):
        totals = residual.clone(), residual.clone()
        normed = norm.rms_norm(addend, factor, 1e-5, totals[0])
        near_rows(product.normalise(addend, totals[1], factor, 1e-5), normed, inputs)
        assert totals[0].equal(totals[1])
    near_rows(product.normalise(x, None, factor, 1e-5), norm.rms_norm(x, factor, 1e-5), inputs)
    activated = elementwise.gated_activation(gate_up, "gelu_new")
    if rows > 64:
        same_rows(product.activate(gate_up, "gelu_new"), activated, inputs)
    else:
        assert product.activate(gate_up, "gelu_new") is None


def near_rows(found, floats, inputs):
    """Quantized rows are ``floats``, quantized, but for few values that differ by one step.

    Triton adds the squares of a row in an order of the kernel's own, so a sum can differ in its
    last bit, and a value on the border of two bf16 numbers with it.
    """
    values, scales = quantize_tokens(floats, inputs)
    assert found.dtype is floats.dtype
    torch.testing.assert_close(found.scales, scales, rtol=0.01, atol=0.0)
    is_other = found.values.view(torch.uint8) != values.view(torch.uint8)
    assert int(is_other.sum()) <= 1 + values.numel() // 10_000
    is_same_scale = (found.scales == scales)[:, None]
    found_bits, bits = (v.view(torch.uint8).to(torch.int32) for v in (found.values, values))
    assert bool((((found_bits - bits).abs() <= 1) | ~is_same_scale).all())


def same_rows(found, floats, inputs):
    """Quantized rows are ``floats``, quantized."""
    values, scales = quantize_tokens(floats, inputs)
    assert found.dtype is floats.dtype
    assert found.values.view(torch.uint8).equal(values.view(torch.uint8))
    assert found.scales.equal(scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 32, 33, 64, 65, 128, 200, 256])
@pytest.mark.parametrize(
    ("outputs", "inner"), [(4096, 4096), (4096, 14336), (544, 1664), (2048, 8192)]
)
def test_products_of_groups_are_those_of_the_torch_twin(rows, outputs, inner, dtype):
    weight, x = weight_of(outputs, inner), drawn(rows, inner, dtype)
    # The products are in the range of float16.
    x = x / x.abs().amax(1, keepdim=True)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    if product.grouped_inputs(rows) is None:
        assert rows > 128
        return
    grouped = byte_reference.quantize_rows(x, ByteInputs())
    expected = byte_reference.multiply_rows(grouped, weight)
    parts = product.parts(grouped)
    if parts is None or rows <= 32 or 64 < rows <= 128:
        assert error(product(grouped), expected) < TOLERANCE
    if parts is not None:
        assert parts.dtype is torch.float32
        assert error(parts.sum(0), expected) < TOLERANCE


def test_other_products_take_no_groups():
    few = GpuByteProduct(weight_of(4096, 4096), ByteInputs(), is_fixed=False)
    assert few.grouped_inputs(300) is None
    for weight, inputs, is_fixed in (
        (weight_of(4096, 4096, 128), ByteInputs(), False),
        (weight_of(4096, 4096), ByteInputs(has_power_scales=True), False),
        (weight_of(4096, 4096), ByteInputs(), True),
        (weight_of(4096, 4112), ByteInputs(), False),
    ):
        product = GpuByteProduct(weight, inputs, is_fixed=is_fixed)
        assert product.grouped_inputs(16) is None


@pytest.mark.parametrize("block", [0, 128])
def test_a_row_of_a_deterministic_product_does_not_depend_on_other_rows(block):
    weight, x = weight_of(4096, 4096, block), drawn(300, 4096)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=True)
    whole = product(x)
    for rows in (1, 16, 65, 129):
        assert product(x[:rows].contiguous()).equal(whole[:rows])


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_products_are_captured_in_a_graph(rows, block):
    weight, x = weight_of(4096, 4096, block), drawn(rows, 4096)
    product = GpuByteProduct(weight, ByteInputs(), is_fixed=False)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(product(x))
    x.copy_(drawn(rows, 4096, seed=1))
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert found.equal(product(product(x)))


def model_of(folder, device, dtype, name="none"):
    found = EngineFolder.load(folder).quantized(name)
    ops = select_ops(device, dtype)
    stage = StageRange.of(found.config.num_hidden_layers, 0, 1)
    model = build_model(
        found.config, stage, ShardPosition(), dtype=dtype, device=device, ops=ops
    )
    load_checkpoint(model, found.weight_files)
    model.process_weights_after_loading()
    return model


@pytest.mark.parametrize("form", list(checkpoints.FORMATS))
def test_layers_of_every_format_give_the_results_of_the_cpu(form, tmp_path):
    config = LlamaConfig(
        vocab_size=150, hidden_size=144, intermediate_size=208, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=24, initializer_range=0.1,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = checkpoints.make(tmp_path, form, config)
    ours = model_of(folder, DEVICE, torch.bfloat16)
    theirs = model_of(folder, torch.device("cpu"), torch.float32)
    for path in ("layers.0.attention.qkv_proj", "layers.1.mlp.gate_up_proj",
                 "layers.1.mlp.down_proj", "layers.1.attention.o_proj"):  # fmt: skip
        layer, other = ours.get_submodule(path), theirs.get_submodule(path)
        for rows in (1, 20, 100):
            x = torch.randn((rows, layer.input_partition.size), dtype=torch.bfloat16)
            found, expected = layer.forward(x.cuda()), other.forward(x.float())
            assert error(found.cpu(), expected) < TOLERANCE, (path, rows)


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_weights_quantized_on_the_gpu_are_those_quantized_on_the_cpu(name, folder):
    ours = model_of(folder, DEVICE, torch.bfloat16, name)
    theirs = model_of(folder, torch.device("cpu"), torch.bfloat16, name)
    expected = dict(theirs.named_parameters())
    for path, parameter in ours.named_parameters():
        found = parameter.cpu().contiguous().view(torch.uint8)
        assert found.equal(expected[path].contiguous().view(torch.uint8)), path
