"""Integer weights on a GPU: the kernel against the plain twin, and layers against the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.integer_checkpoints import FORMS
from trimaran.kernels.cuda import (
    integer_choice,
    integer_floats,
    integer_gemm,
    integer_skinny,
    integer_wide,
)
from trimaran.kernels.cuda.integer_gemm import Cut
from trimaran.kernels.cuda.integer_units import pack_units
from trimaran.kernels.cuda.integer_wide import WideCut
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.integer_columns import Columns
from trimaran.kernels.integer_products import HopperIntegerProduct, TritonIntegerProduct
from trimaran.kernels.integer_reference import ReferenceIntegerProduct, dequantize
from trimaran.kernels.integers import Groups, IntegerWeight
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ShardPosition

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SIZES = [(1, 4096, 4096), (7, 6144, 4096), (16, 4096, 14336), (33, 200, 320),
         (64, 28672, 4096), (65, 4096, 4096), (300, 1032, 512), (1024, 6144, 4096)]  # fmt: skip
TOLERANCE = 3e-3
"""Norm of the deviation relative to the result's: rounding to bf16 makes 1.6e-3."""

KINDS = {
    "4-bits": (4, 128, ""),
    "4-bits-zeros": (4, 64, "zeros"),
    "4-bits-order": (4, 128, "order"),
    "4-bits-minimums": (4, 32, "minimums"),
    "8-bits-rows": (8, None, ""),
    "8-bits-zeros": (8, 128, "zeros"),
}


def weight_of(kind, outputs, inner):
    bits, size, extra = KINDS[kind]
    generator = torch.Generator(DEVICE).manual_seed(outputs + inner)
    shape = outputs, inner * bits // 8
    values = torch.randint(0, 256, shape, generator=generator, device=DEVICE).to(torch.uint8)
    groups = Groups(size or inner)
    numbers = groups.numbers(inner, DEVICE)
    if extra == "order":
        mixed = numbers[torch.randperm(inner, generator=generator, device=DEVICE)]
        groups = groups._replace(of_inputs=mixed.to(torch.int32))
    counts = outputs, int(numbers.max()) + 1
    scales = torch.rand(counts, generator=generator, device=DEVICE) / 64
    zeros = torch.randint(1, 1 << bits, counts, generator=generator, device=DEVICE)
    minimums = torch.rand(counts, generator=generator, device=DEVICE) / -8
    return IntegerWeight(
        values,
        scales.half().float(),
        groups,
        bits,
        zeros.to(torch.int16) if extra in ("zeros", "order") else None,
        minimums.half().float() if extra == "minimums" else None,
    )


def drawn(rows, inner, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn((rows, inner), generator=generator, device=DEVICE)
    # Tokens and channels of very different sizes, as in real models.
    spread = torch.randn(inner, generator=generator, device=DEVICE).exp()
    return (x * spread * torch.logspace(-2, 2, rows, device=DEVICE)[:, None]).to(dtype)


def product_of(kernel, weight, dtype=torch.bfloat16, *, has_byte_inputs=False, is_fixed=False):
    how = {"has_byte_inputs": has_byte_inputs, "is_fixed": is_fixed}
    if kernel == "triton":
        return TritonIntegerProduct(weight, **how)
    return HopperIntegerProduct(weight, dtype, **how)


def error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


KERNELS = ("cuda", "triton")


@pytest.mark.parametrize(
    ("kind", "kernel"),
    # Minimums are multiplied by Triton's kernel alone.
    [
        (kind, kernel)
        for kind in KINDS
        for kernel in KERNELS
        if (kind, kernel) != ("4-bits-minimums", "cuda")
    ],
)
@pytest.mark.parametrize(("rows", "outputs", "inner"), SIZES)
def test_products_are_those_of_the_torch_twin(kernel, kind, rows, outputs, inner):
    weight = weight_of(kind, outputs, inner)
    for dtype in (torch.bfloat16, torch.float16):
        x = drawn(rows, inner, dtype) * 0.01
        bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
        twin = ReferenceIntegerProduct(weight, has_byte_inputs=False)
        expected = twin(x.float(), bias)
        for is_fixed in (False, True):
            product = product_of(kernel, weight, dtype, is_fixed=is_fixed)
            for _ in range(2):
                # Counters are left at zero for the next product.
                assert error(product(x, bias), expected) < TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "4-bits-minimums"])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (200, 320)])
def test_units_become_the_floats_of_their_definition(kind, outputs, inner):
    weight = weight_of(kind, outputs, inner)
    columns = Columns.of(weight)
    units = pack_units(weight, columns)
    for dtype in (torch.bfloat16, torch.float16):
        expected = dequantize(weight, dtype)
        if columns.order is not None:
            expected = columns.gather(expected)
        found = integer_floats.dequantize(units, dtype)[:, : expected.shape[1]]
        if columns.order is not None:
            found = found * (columns.order > 0)
        assert found.equal(expected)


@pytest.mark.parametrize("rows", [16, 64, 96, 128, 300])
@pytest.mark.parametrize(("outputs", "inner"), [(4096, 4096), (6144, 4096), (1000, 640)])
def test_blocks_that_share_rows_have_the_results_of_others(rows, outputs, inner):
    weight = weight_of("4-bits-zeros", outputs, inner)
    units = pack_units(weight, Columns.of(weight))
    x = drawn(rows, inner)
    for split in (1, 2):
        cut = Cut(min(rows, 128), 2, split)
        expected = integer_gemm.multiply(x, units, None, x.dtype, cut)
        for sharing in (2, 4):
            if cut.rows // sharing % 8:
                continue
            shared = cut._replace(sharing=sharing)
            assert integer_gemm.multiply(x, units, None, x.dtype, shared).equal(expected)


WIDE_CUTS = [
    WideCut(32), WideCut(96, 3), WideCut(128, 2, 2), WideCut(208), WideCut(256),
    WideCut(128, 3, sharing=2), WideCut(256, sharing=4),
]  # fmt: skip
ROUNDED = ("4-bits", "4-bits-zeros", "8-bits-rows", "8-bits-zeros")


def rounded_product(x, weight, bias=None):
    """By weights that are rounded to the dtype of ``x``."""
    columns = Columns.of(weight)
    weight_EK = columns.gather(dequantize(weight, x.dtype)).double()
    total = columns.gather(x).double() @ weight_EK.T
    return total if bias is None else total + bias.double()


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner"), [(300, 1032, 640), (129, 200, 384), (1000, 4096, 4096)]
)
def test_wide_cuts_multiply_by_rounded_weights(kind, rows, outputs, inner):
    weight = weight_of(kind, outputs, inner)
    for wide_scales in (False, True):
        scales = (
            weight.scales * 1.0009765625 if wide_scales else weight.scales.bfloat16().float()
        )
        given = weight._replace(scales=scales)
        units = pack_units(given, Columns.of(given))
        for dtype in (torch.bfloat16, torch.float16):
            x = drawn(rows, inner, dtype) * 0.01
            bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
            expected = rounded_product(x, given, bias)
            found = [integer_wide.multiply(x, units, bias, cut) for cut in WIDE_CUTS]
            assert error(found[0], expected) < (2e-3 if dtype == torch.bfloat16 else 3e-4)
            assert all(each.equal(found[0]) for each in found)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(300, 1024, 640), (60, 14336, 4096)])
def test_swiglu_of_rounded_weights_is_that_of_the_torch_twin(kind, rows, outputs, inner):
    weight = weight_of(kind, outputs, inner)
    units = pack_units(weight, Columns.of(weight))
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn((rows, inner), device=DEVICE).to(dtype) / 16
        gate, up = rounded_product(x, weight).chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        for cut in (WideCut(64, 2, 2), WideCut(96, 2, 2), WideCut(128, 2, 2, 2)):
            found = integer_wide.multiply_gated(x, units, cut)
            assert error(found, expected) < (2e-3 if dtype == torch.bfloat16 else 3e-4)


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize(("rows", "outputs", "inner"), [(300, 1030, 640), (129, 200, 384)])
def test_split_products_of_rounded_weights_are_those_of_the_torch_twin(
    kind, rows, outputs, inner
):
    weight = weight_of(kind, outputs, inner)
    units = pack_units(weight, Columns.of(weight))
    x = drawn(rows, inner) * 0.01
    expected = rounded_product(x, weight)
    for split in (1, 2):
        cuts = [
            Cut(size, tiles, split, sharing, is_scaled=True)
            for size, tiles in ((64, 3), (128, 3), (256, 2))
            for sharing in (1, 2)
        ]
        for dtype in (torch.bfloat16, torch.float32):
            found = [integer_gemm.multiply(x, units, None, dtype, cut) for cut in cuts]
            assert error(found[0], expected) < (2e-3 if dtype == torch.bfloat16 else 1e-4)
            assert all(each.equal(found[0]) for each in found)


@pytest.mark.parametrize("rows", [48, 128, 700, 3000])
def test_gates_above_ups_have_one_kernel_for_many_rows(rows):
    weight = weight_of("4-bits-order", 28672, 4096)
    x = torch.randn((rows, 4096), device=DEVICE, dtype=torch.bfloat16) / 16
    product = HopperIntegerProduct(
        weight, x.dtype, has_byte_inputs=False, is_fixed=False, is_gated=True
    )
    gate, up = rounded_product(x, weight).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    assert error(product.gated(x), expected) < TOLERANCE
    between = slice(0, integer_choice.MIN_ROWS - 1)
    assert product.gated(x[between]) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "4-bits-minimums"])
@pytest.mark.parametrize(
    ("outputs", "inner"),
    # The last weight has several tiles a block.
    [(256, 384), (6144, 4096), (4096, 14336), (28672, 4096), (100_000, 1024)],
)
def test_few_rows_are_multiplied_by_whole_weights_and_as_swiglu(kind, outputs, inner):
    weight = weight_of(kind, outputs, inner)
    units = pack_units(weight, Columns.of(weight))
    floats = dequantize(weight, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        product = HopperIntegerProduct(
            weight, dtype, has_byte_inputs=False, is_fixed=False, is_gated=True
        )
        bias = torch.randn(outputs, device=DEVICE, dtype=dtype)
        for rows in range(1, 10):
            x = drawn(rows, inner, dtype) * 0.01
            exact = x.float() @ floats.T
            assert error(product(x, bias), exact + bias.float()) < TOLERANCE
            assert error(product(x, None, torch.float32), exact) < 1e-4
            # Gates and ups in the range of float16.
            x = (x.float() / exact.std(1, keepdim=True)).to(dtype)
            gate, up = (x.float() @ floats.T).chunk(2, 1)
            found = product.gated(x)
            can_gate = integer_skinny.can_multiply(units, is_gated=True)
            assert (found is not None) == (can_gate and rows <= integer_skinny.MAX_ROWS)
            if found is not None:
                assert error(found, torch.nn.functional.silu(gate) * up) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows_are_multiplied_wherever_they_lie(rows):
    weight = weight_of("4-bits", 512, 640)
    product = product_of("cuda", weight)
    wide = drawn(rows, 650)
    for first in (0, 8, 5):
        x = wide[:, first : first + 640]
        expected = ReferenceIntegerProduct(weight, has_byte_inputs=False)(x.float())
        assert error(product(x), expected) < TOLERANCE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "outputs", "inner"), SIZES[::3])
def test_products_of_bytes_are_those_of_the_torch_twin(kernel, rows, outputs, inner):
    weight, x = weight_of("8-bits-rows", outputs, inner), drawn(rows, inner)
    product = product_of(kernel, weight, has_byte_inputs=True)
    expected = ReferenceIntegerProduct(weight, has_byte_inputs=True)(x)
    assert error(product(x), expected) < TOLERANCE


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["4-bits-zeros", "8-bits-rows"])
def test_a_row_of_a_deterministic_product_does_not_depend_on_other_rows(kernel, kind):
    weight, x = weight_of(kind, 4096, 4096), drawn(300, 4096)
    product = product_of(kernel, weight, is_fixed=True)
    whole = product(x)
    for rows in (1, 16, 65, 129):
        assert product(x[:rows].contiguous()).equal(whole[:rows])


@pytest.mark.parametrize("kind", ["4-bits", "4-bits-order", "8-bits-rows"])
@pytest.mark.parametrize("rows", [1, 64, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_products_are_captured_in_a_graph(kernel, rows, kind):
    weight, x = weight_of(kind, 4096, 4096), drawn(rows, 4096)
    product = product_of(kernel, weight)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(product(x))
    x.copy_(drawn(rows, 4096, seed=1))
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert found.equal(product(product(x)))


def model_of(folder, device, dtype):
    found = EngineFolder.load(folder)
    stage = StageRange.of(found.config.num_hidden_layers, 0, 1)
    ops = select_ops(device, dtype)
    model = build_model(
        found.config, stage, ShardPosition(), dtype=dtype, device=device, ops=ops
    )
    load_checkpoint(model, found.weight_files)
    model.process_weights_after_loading()
    return model


@pytest.mark.parametrize("form", list(FORMS))
def test_layers_of_every_format_give_the_results_of_the_cpu(form, tmp_path):
    config = LlamaConfig(
        vocab_size=150, hidden_size=144, intermediate_size=208, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=24, initializer_range=0.1,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = integer_checkpoints.make(tmp_path, FORMS[form], config)
    ours = model_of(folder, DEVICE, torch.bfloat16)
    theirs = model_of(folder, torch.device("cpu"), torch.float32)
    for path in ("layers.0.attention.qkv_proj", "layers.1.mlp.gate_up_proj",
                 "layers.1.mlp.down_proj", "layers.1.attention.o_proj"):  # fmt: skip
        layer, other = ours.get_submodule(path), theirs.get_submodule(path)
        for rows in (1, 20, 100):
            x = torch.randn((rows, layer.input_partition.size), dtype=torch.bfloat16)
            found, expected = layer.forward(x.cuda()), other.forward(x.float())
            assert error(found.cpu(), expected) < TOLERANCE, (path, rows)
