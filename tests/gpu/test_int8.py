"""INT8 products and inputs on a GPU: kernels against the plain twin, and models on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.driver import Driver
from tests.gpu.test_fp8 import drawn, error, same_rows
from tests.gpu.test_kv_cache_engine import PROMPTS
from trimaran.kernels import byte_reference, integer_reference
from trimaran.kernels.byte_products import FIXED_TILE, GpuByteProduct, stream_tile
from trimaran.kernels.cuda import byte_gemm, paired_cuts
from trimaran.kernels.quantized import INT8, ByteInputs, ByteRows, ByteWeight
from trimaran.kernels.reference import silu_and_mul
from trimaran.kernels.triton import elementwise, norm
from trimaran.kernels.triton.byte_gemm import Inputs, multiply_stream, multiply_tiles
from trimaran.kernels.triton.byte_inputs import quantize_tokens
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
KINDS = ["token", "static"]
TOKENS = ByteInputs(dtype=INT8)
SIZES = [(4096, 4096), (6144, 4096), (4096, 14336), (544, 1552), (200, 272), (96, 16)]
ROWS = [1, 8, 9, 33, 64, 65, 128, 129, 256, 257, 300, 1000, 2048]
TOLERANCE = 4e-3


def inputs_of(kind):
    return TOKENS if kind == "token" else TOKENS._replace(scale=torch.tensor(0.03).to(DEVICE))


def weight_of(outputs, inner, *, is_whole=False):
    generator = torch.Generator(DEVICE).manual_seed(outputs + inner)
    values = torch.randint(-128, 128, (outputs, inner), generator=generator, device=DEVICE)
    scales = torch.rand(outputs, generator=generator, device=DEVICE) / 1024 + 1e-4
    scales = scales[:1].repeat(outputs) if is_whole else scales
    return ByteWeight(values.to(torch.int8), scales)


def rows_of(rows, inner, dtype=torch.bfloat16, seed=0):
    """Tokens whose products are in the range of float16."""
    x = drawn(rows, inner, dtype, seed)
    return x / x.abs().amax(1, keepdim=True)


def shares_inputs(rows, weight):
    if not byte_gemm.can_multiply(weight):
        return False
    cut = byte_gemm._cut_of(rows, byte_gemm._Product.of(weight, "plain"))
    return cut is not None and cut.split > 1


def exact(x, weight, bias=None):
    """Products of quantized inputs: exact sums, multiplied by their scales, rounded once."""
    # Sums are below 2**53.
    totals = x.values.double() @ weight.values.double().T
    scaled = totals.float() * (x.scales[:, None] * weight.scales)
    return scaled if bias is None else scaled + bias.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "inner"), [(1, 4096), (300, 14336), (3, 28672), (5, 200)])
def test_quantization_has_the_bits_of_the_torch_twin(rows, inner, kind, dtype):
    inputs, x = inputs_of(kind), drawn(rows, inner + 8, dtype)[:, :inner]
    x[0, :4] = 0
    values, scales = quantize_tokens(x, inputs)
    expected, expected_scales = integer_reference.quantize_inputs(x, inputs.scale)
    assert values.equal(expected) and scales.equal(expected_scales.reshape(-1))
    x[-1, 3] = torch.nan
    assert quantize_tokens(x, inputs)[1].isnan().nonzero().flatten().tolist() == [rows - 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inner"), SIZES)
def test_products_have_the_bits_of_exact_sums(rows, outputs, inner, dtype):
    weight, x = weight_of(outputs, inner), rows_of(rows, inner, dtype)
    product = GpuByteProduct(weight, TOKENS, is_fixed=False)
    quantized = product.quantize(x)
    expected, found, parts = exact(quantized, weight), product(x), product.parts(x)
    assert found.dtype is dtype and error(found, expected) < TOLERANCE
    # Blocks that share the inputs add up their sums in float32.
    if not shares_inputs(rows, weight):
        assert found.equal(expected.to(dtype))
    assert product(ByteRows(*quantized, dtype)).equal(found)
    fixed = GpuByteProduct(weight, TOKENS, is_fixed=True)
    assert fixed(x).equal(expected.to(dtype))
    assert fixed.parts(x) is None and fixed.gated(x) is None
    if parts is not None:
        assert parts.dtype is torch.float32
        assert error(parts.sum(0), expected) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 64, 300])
@pytest.mark.parametrize(("outputs", "inner"), SIZES[3:5])
def test_a_bias_is_added_before_the_rounding(rows, outputs, inner):
    weight, x = weight_of(outputs, inner), rows_of(rows, inner)
    bias = torch.randn(outputs, device=DEVICE, dtype=x.dtype)
    product = GpuByteProduct(weight, TOKENS, is_fixed=False)
    # The rounding of a sum and that of its product by a scale may be one.
    found, expected = product(x, bias), exact(product.quantize(x), weight, bias)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("is_whole", [True, False], ids=["tensor", "channel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 80, 500])
def test_all_scales_are_those_of_the_definition(rows, kind, is_whole):
    weight, x = weight_of(2048, 1024, is_whole=is_whole), rows_of(rows, 1024)
    found = GpuByteProduct(weight, inputs_of(kind), is_fixed=False)(x)
    expected = byte_reference.ReferenceProduct(weight, inputs_of(kind))(x.float())
    assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (200, 272)])
def test_streams_and_tiles_of_triton_have_the_same_bits(rows, outputs, inner):
    weight, x = weight_of(outputs, inner), rows_of(rows, inner)
    quantized = Inputs(*quantize_tokens(x, TOKENS))
    expected = exact(quantized, weight).bfloat16()
    tile = stream_tile(rows, outputs, inner)
    for cut in (tile, tile._replace(parts=1), tile._replace(parts=5)):
        for _ in range(2):
            assert multiply_stream(quantized, weight, None, x.dtype, cut).equal(expected)
    assert multiply_tiles(quantized, weight, None, x.dtype, FIXED_TILE).equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inner"), [(28672, 4096), (544, 144), (96, 16)])
def test_gated_products_are_those_of_exact_sums(rows, outputs, inner, dtype):
    weight, x = weight_of(outputs, inner), rows_of(rows, inner, dtype)
    product = GpuByteProduct(weight, TOKENS, is_fixed=False)
    found = product.gated(x)
    assert found is not None and found.dtype is dtype
    assert error(found, silu_and_mul(exact(product.quantize(x), weight))) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "columns"),
    [(kind, columns) for kind in ("plain", "gated") for columns in paired_cuts.widths(kind)],
)
@pytest.mark.parametrize("rows", [129, 700])
def test_every_tile_of_many_rows_multiplies_exactly(rows, kind, columns):
    weight, x = weight_of(1056, 528), rows_of(rows, 528)
    quantized = ByteRows(*quantize_tokens(x, TOKENS), x.dtype)
    cut = paired_cuts.tile_of(columns)
    kernel = byte_gemm._kernel(cut, kind, x.dtype, DEVICE, "INT8", False)
    found = kernel.multiply_bytes(*quantized[:2], *weight[:2])
    expected = exact(quantized, weight)
    if kind == "gated":
        assert error(found, silu_and_mul(expected)) < TOLERANCE
    else:
        assert found.equal(expected.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (300, 4096), (5, 200), (80, 14336)])
def test_norms_and_activations_make_the_rows_of_separate_kernels(rows, width, kind):
    inputs, factor = inputs_of(kind), drawn(1, width)[0]
    product = GpuByteProduct(weight_of(64, width), inputs, is_fixed=True)
    x, residual = drawn(rows, width), drawn(rows, width, seed=1)
    totals = residual.clone(), residual.clone()
    normed = norm.rms_norm(x, factor, 1e-5, totals[0])
    values, scales = quantize_tokens(normed, inputs)
    found = product.normalise(x, totals[1], factor, 1e-5)
    assert totals[0].equal(totals[1]) and found.dtype is x.dtype
    # Squares are added up in another order, and may move a number to the next bf16 number.
    torch.testing.assert_close(found.scales, scales, rtol=0.01, atol=0.0)
    away = (found.values.int() - values.int()).abs()
    assert int(away.max()) <= 1 and int(away.sum()) <= 1 + values.numel() // 1000
    gate_up = drawn(rows, 2 * width)
    if rows > 64:
        activated = elementwise.gated_activation(gate_up, "silu")
        same_rows(product.activate(gate_up, "silu"), activated, inputs)


def test_products_of_float32_are_float32():
    weight, x = weight_of(512, 256), rows_of(300, 256, torch.float32)
    product = GpuByteProduct(weight, TOKENS, is_fixed=False)
    assert product.gated(x) is None and product.parts(x) is None
    assert product(x).equal(exact(product.quantize(x), weight))


@pytest.mark.parametrize("rows", [1, 64, 256, 1024])
def test_products_are_captured_in_a_graph(rows):
    weight, x = weight_of(4096, 4096), rows_of(rows, 4096)
    product = GpuByteProduct(weight, TOKENS, is_fixed=False)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(product(x))
    x.copy_(rows_of(rows, 4096, seed=1))
    graph.replay()
    assert found.equal(product(product(x)))


def driver_of(folder, device, **changes):
    scheduler = SchedulerConfig(max_num_seqs=8, max_seq_len=128, max_input_len=127)
    return Driver(
        EngineConfig(
            model="test", engine_dir=folder, device=device, quantization="w8a8_int8",
            scheduler=scheduler, cache=CacheConfig(tokens_per_block=16, max_tokens=1024),
            **changes,
        )
    )  # fmt: skip


def test_greedy_tokens_in_float32_are_those_of_the_cpu(folder):
    on_gpu = driver_of(folder, "cuda", dtype="float32").serve(PROMPTS, ({},))
    on_cpu = driver_of(folder, "cpu", dtype="float32").serve(PROMPTS, ({},))
    # An input on the edge between two integers may round to either: one output of four may
    # part.
    assert sum(ours == theirs for ours, theirs in zip(on_gpu, on_cpu, strict=True)) >= 3


def test_tokens_of_a_deterministic_engine_do_not_depend_on_other_requests(folder):
    driver = driver_of(folder, "cuda", dtype="bfloat16", deterministic=True)
    together = driver.serve(PROMPTS, ({},))
    assert together == [driver.serve([prompt], ({},))[0] for prompt in PROMPTS]
