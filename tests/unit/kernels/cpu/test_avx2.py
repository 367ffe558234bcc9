"""The AVX2 variants of the CPU kernels, tested on processors with AVX-512 too."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import build, reference
from trimaran.kernels.build import KernelsUnavailableError, load_library
from trimaran.kernels.cpu.operators import CpuOps
from trimaran.kernels.cpu.sampling import CpuSampling

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
AVX2 = frozenset({"avx2", "fma", "f16c"})


@pytest.fixture
def library(monkeypatch):
    """The kernels for a processor with AVX2 only."""
    monkeypatch.setattr(build, "cpu_features", lambda: AVX2)
    return load_library()


def _random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 33])
@pytest.mark.parametrize(("width", "outputs"), [(16, 8), (51, 13), (160, 96)])
def test_products_equal_those_of_torch_and_each_row_is_independent(
    library, dtype, rows, width, outputs
):
    ops = CpuOps(library, dtype, 1)
    x, weight = (
        _random(rows, width, dtype=dtype, seed=0),
        _random(outputs, width, dtype=dtype, seed=1),
    )
    bias = _random(outputs, dtype=dtype, seed=2)

    y = ops.linear(x, weight, bias)

    limit = TOLERANCE[dtype]
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(y.float(), expected, atol=8 * limit, rtol=limit)
    assert ops.linear(x[:1], weight, bias).equal(y[:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 16, 33, 128])
def test_norms_and_activations_are_those_of_the_reference(library, dtype, width):
    ops = CpuOps(library, dtype, 1)
    x, weight = _random(4, width, dtype=dtype, seed=0), _random(width, dtype=dtype, seed=1)
    # Over the whole range of the exponent, denormal results included.
    gates = torch.linspace(-110, 110, 2 * width).repeat(3, 1).to(dtype)

    limit = TOLERANCE[dtype]
    for ours, theirs in (
        (ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
        (ops.silu_and_mul(gates), reference.silu_and_mul(gates)),
    ):
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)


def test_the_likeliest_ids_are_those_of_torch(library):
    logits = torch.randint(-5, 5, (9, 1003), generator=torch.Generator().manual_seed(0)).float()

    assert CpuSampling(library).argmax(logits).equal(logits.argmax(dim=-1))


def test_backends_are_named_by_what_they_use(library):
    names = CpuOps(library, torch.bfloat16, 1).backends

    assert names["linear"] == names["paged_attention"] == CpuSampling(library).name == "avx2"


def test_the_refusal_on_a_processor_without_avx2_names_the_missing_instructions(monkeypatch):
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"fma", "sse4_2"}))

    with pytest.raises(KernelsUnavailableError, match="this processor lacks avx2, f16c"):
        load_library()
