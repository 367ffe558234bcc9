"""The Triton kernels against their torch twins.

On a machine without a GPU they run in Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.gpu import TritonOps

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter's products of bf16 are not those of the hardware.
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def ops():
    return TritonOps()


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def _close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=limit * scale, rtol=limit)


@pytest.mark.parametrize("width", [64, 500, 4096])
def test_norms_are_those_of_the_reference(ops, dtype, width):
    x, weight = _random(9, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    residual = _random(9, width, dtype=dtype, seed=3)
    ours, theirs = residual.clone(), residual.clone()

    _close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 4)
    normed = ops.add_rms_norm(x, ours, weight, 1e-5)

    _close(normed, reference.add_rms_norm(x, theirs, weight, 1e-5), 4)
    assert ours.equal(theirs)


@pytest.mark.parametrize("width", [96, 21, 1500])
def test_silu_and_mul_is_that_of_the_reference(ops, dtype, width):
    x = _random(5, 2 * width, dtype=dtype) * 8
    _close(ops.silu_and_mul(x), reference.silu_and_mul(x), 4)


@pytest.mark.parametrize(("heads", "head_size"), [(4, 64), (20, 16), (40, 128)])
def test_rotation_is_that_of_the_reference_on_strided_heads(ops, dtype, heads, head_size):
    qkv = _random(7, heads + 2, head_size, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.arange(head_size // 2) + 0.5)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = torch.tensor([0, 3, 49, 2, 2, 17, 1], device=DEVICE)
    ours, theirs = qkv.clone(), qkv.clone()

    ops.rotate(ours[:, :heads], table, positions)

    reference.rotate(theirs[:, :heads], table, positions)
    _close(ours, theirs)


def test_keys_and_values_reach_their_slots_and_no_other(ops, dtype):
    pool = torch.zeros((6, 3, 2, 4, 2, 16), dtype=dtype, device=DEVICE)
    expected = pool.clone()
    qkv = _random(5, 8, 16, dtype=dtype)
    slots = torch.tensor([0, 23, 7, 8, 13], device=DEVICE)

    ops.write_kv(qkv[:, 4:6], qkv[:, 6:], pool[:, 1], slots)

    reference.write_kv(qkv[:, 4:6], qkv[:, 6:], expected[:, 1], slots)
    assert pool.equal(expected)
