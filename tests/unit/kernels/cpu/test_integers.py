"""Products by integer weights on a CPU: those of the plain twin, by all instructions."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import build
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.integer_reference import ReferenceIntegerProduct, pack
from trimaran.kernels.integers import Groups, IntegerWeight

_AVX2 = {"avx2", "fma", "f16c"}
FEATURES = {
    name: features
    for name, features in {
        "avx2": _AVX2,
        "avx512": {*_AVX2, *build.AVX512_FEATURES},
        "all": build.cpu_features(),
    }.items()
    if features <= build.cpu_features()
}
"""Instruction sets of this machine; others would end the process."""
CASES = {
    "8-bits-rows": (8, 512, 96, 512, ""),
    "4-bits": (4, 128, 1000, 512, ""),
    "4-bits-order": (4, 32, 77, 520, "order"),
    "8-bits-order": (8, 24, 33, 104, "order"),
    "4-bits-minimums": (4, 32, 64, 256, "minimums"),
    "8-bits-odd-width": (8, 51, 5, 51, "zeros"),
    "4-bits-groups-of-96": (4, 96, 80, 480, ""),
    "fp4": (4, 32, 48, 256, "fp4"),
}


def weight_of(case):
    bits, size, outputs, inner, extra = CASES[case]
    generator = torch.Generator().manual_seed(inner)
    integers = torch.randint(0, 1 << bits, (outputs, inner), generator=generator)
    groups, counts = Groups(size), (outputs, -(-inner // size))
    if extra == "order":
        mixed = groups.numbers(inner, integers.device)
        order = torch.randperm(inner, generator=generator)
        groups = groups._replace(of_inputs=mixed[order].to(torch.int32))
    zeros = torch.randint(1, 1 << bits, counts, generator=generator, dtype=torch.int16)
    return IntegerWeight(
        pack(integers.to(torch.uint8), bits),
        torch.rand(counts, generator=generator) / 64,
        groups,
        bits,
        zeros if extra in ("zeros", "order") else None,
        torch.randn(counts, generator=generator) / 8 if extra == "minimums" else None,
        is_fp4=extra == "fp4",
    )


@pytest.fixture(scope="module", params=list(FEATURES))
def library(request):
    """The kernels for a processor with some of this machine's instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "cpu_features", lambda: frozenset(FEATURES[request.param]))
        yield load_library()


@pytest.mark.parametrize("inputs", ["floats", "bytes", "static bytes"])
@pytest.mark.parametrize("case", list(CASES))
def test_products_are_those_of_the_twin_and_each_row_is_independent(library, case, inputs):
    weight, has_byte_inputs = weight_of(case), inputs != "floats"
    if inputs == "static bytes":
        weight = weight._replace(input_scale=torch.tensor(0.5))
    outputs, inner = weight.shape
    twin = ReferenceIntegerProduct(weight, has_byte_inputs=has_byte_inputs)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        product = CpuOps(library, dtype, 1).integer_product(
            weight, has_byte_inputs=has_byte_inputs
        )
        bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        # Rows alone and together are multiplied by different instructions, if there are tiles.
        for rows in (1, 2, 3, 9, 17, 150):
            x = torch.randn((rows, inner), generator=torch.Generator().manual_seed(rows))
            # Inputs of very different sizes, as in real models.
            x = (x * torch.logspace(-2, 2, inner)).to(dtype)
            found = product(x, bias, torch.float32)
            expected = twin(x, bias, torch.float32)
            # Inputs have 16 bits beside the largest of their segment, those of float32 30.
            most = 1e-5 if dtype is torch.float32 else 3e-4
            assert (found - expected).norm() <= most * expected.norm()
            alone = [product(row, bias, torch.float32) for row in x.split(1)]
            assert torch.cat(alone).equal(found)


def test_inputs_that_are_no_numbers_make_no_numbers(library):
    weight = weight_of("4-bits")
    x = torch.ones(3, 512, dtype=torch.bfloat16)
    x[0, 5], x[1, 300] = float("nan"), float("inf")
    static = weight._replace(input_scale=torch.tensor(0.5))
    for each, has_byte_inputs in ((weight, False), (weight, True), (static, True)):
        product = CpuOps(library, torch.bfloat16, 1).integer_product(
            each, has_byte_inputs=has_byte_inputs
        )
        assert product(x).isnan().all(1).tolist() == [True, True, False]
    twin = ReferenceIntegerProduct(static, has_byte_inputs=True)
    assert twin(x).isnan().all(1).tolist() == [True, True, False]


@pytest.mark.parametrize("case", ["8-bits-rows", "4-bits"])
def test_layers_cut_between_ranks_add_up_to_the_whole(library, case):
    weight = weight_of(case)
    inner = weight.shape[1]
    half = inner // 2
    ops = CpuOps(library, torch.float32, 1)
    x = torch.randn((2, inner), generator=torch.Generator().manual_seed(0))
    bytes_of_half = half * weight.bits // 8
    groups = 1 if weight.scales.shape[1] == 1 else half // weight.groups.size
    left = weight._replace(
        values=weight.values[:, :bytes_of_half].contiguous(), scales=weight.scales[:, :groups]
    )
    right = weight._replace(
        values=weight.values[:, bytes_of_half:].contiguous(), scales=weight.scales[:, -groups:]
    )
    whole = ops.integer_product(weight)(x)
    parts = ops.integer_product(left)(x[:, :half]) + ops.integer_product(right)(x[:, half:])
    torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
