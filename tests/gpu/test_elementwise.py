"""Operators on each token: the Triton kernels against their torch twins.

On a machine without a GPU they run in Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import HeadNorms
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.triton import norm

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter cuts bf16 where the hardware rounds.
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

# The overflowing value is a divisor, and the result 0 is right. Only numpy in the interpreter
# warns.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]


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
    x = _random(9, 2 * width, dtype=dtype)[:, :width]
    weight, bias = _random(width, dtype=dtype, seed=1), _random(width, dtype=dtype, seed=2)

    _close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 4)
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    _close(ops.layer_norm(x, weight, bias, 1e-5), expected, 4)


@pytest.mark.parametrize(
    ("num_queries", "num_kv", "size"), [(12, 2, 20), (32, 8, 128), (1, 1, 256), (5, 5, 64)]
)
def test_norms_of_heads_are_those_of_the_reference(ops, dtype, num_queries, num_kv, size):
    all_heads = num_queries + 2 * num_kv
    wide = _random(7, (all_heads + 1) * size, dtype=dtype)
    weights = _random(size, dtype=dtype, seed=1), _random(size, dtype=dtype, seed=2)
    expected = wide.clone()
    product = slice(0, all_heads * size)
    reference.norm_heads(expected[:, product].view(7, -1, size), *weights, num_kv, 1e-5)

    ops.norm_heads(wide[:, product].view(7, -1, size), *weights, num_kv, 1e-5)

    _close(wide, expected, 4)
    assert wide[:, -(num_kv + 1) * size :].equal(expected[:, -(num_kv + 1) * size :])


def test_a_layer_norm_of_large_values_with_little_spread_is_that_of_the_reference(ops):
    x = 1000 + _random(3, 300, dtype=torch.float32)
    weight, bias = torch.ones(300, device=DEVICE), torch.zeros(300, device=DEVICE)

    actual = ops.layer_norm(x, weight, bias, 1e-5)

    expected = reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(actual, expected.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("width", [64, 500, 4096])
def test_fused_norms_leave_the_sum_in_the_residual(ops, dtype, width):
    x, weight = _random(9, width, dtype=dtype), _random(width, dtype=dtype, seed=1)
    bias, residual = _random(width, dtype=dtype, seed=2), _random(9, width, dtype=dtype, seed=3)
    ours, theirs = residual.clone(), residual.clone()

    normed = ops.add_rms_norm(x, ours, weight, 1e-5)

    _close(normed, reference.add_rms_norm(x, theirs, weight, 1e-5), 4)
    assert ours.equal(theirs)
    ours, theirs = residual.clone(), residual.clone()
    normed = ops.add_layer_norm(x, ours, weight, bias, 1e-5)
    _close(normed, reference.add_layer_norm(x, theirs, weight, bias, 1e-5), 4)
    assert ours.equal(theirs)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("width", [64, 500])
def test_a_norm_sums_the_partial_results_of_a_product(ops, dtype, width, parts):
    x = _random(parts, 9, width, dtype=torch.float32)
    weight, residual = _random(width, dtype=dtype, seed=1), _random(9, width, dtype=dtype)
    ours, theirs = residual.clone(), residual.clone()

    normed = ops.add_rms_norm(x, ours, weight, 1e-5)

    _close(normed, reference.add_rms_norm(x, theirs, weight, 1e-5), 4)
    _close(ours, theirs)


def test_norms_of_many_rows_have_the_bits_of_norms_of_few_rows(ops, dtype, monkeypatch):
    rows, width = 800, 4000
    if IS_INTERPRETED:
        # A small GPU: programs of the interpreter run one after another.
        rows = 40
        monkeypatch.setattr(norm, "_RESIDENT_WARPS", 7 * norm.norm_warps(4096))
    x = _random(rows, width + 8, dtype=dtype)[:, :width]
    weight = _random(width, dtype=dtype, seed=1)
    residual = _random(rows, width, dtype=dtype, seed=3)

    def both_norms(part: slice) -> list[torch.Tensor]:
        total = residual[part].clone()
        alone = ops.rms_norm(x[part], weight, 1e-5)
        return [alone, ops.add_rms_norm(x[part], total, weight, 1e-5), total]

    together = both_norms(slice(None))

    for part in (slice(0, 2), slice(rows // 2, rows // 2 + 3), slice(rows - 2, rows)):
        for whole, few in zip(together, both_norms(part), strict=True):
            assert torch.equal(whole[part], few)


def test_a_rows_norm_does_not_depend_on_the_rows_beside_it(ops, dtype):
    x, weight = _random(40, 768, dtype=dtype), _random(768, dtype=dtype, seed=1)

    together = ops.rms_norm(x, weight, 1e-5)

    for count in (1, 2, 39):
        assert ops.rms_norm(x[-count:], weight, 1e-5).equal(together[-count:])


@pytest.mark.parametrize("width", [96, 21, 1500])
@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"])
def test_activations_are_those_of_the_reference(ops, dtype, width, name):
    x = _random(5, 2 * width, dtype=dtype) * 8
    _close(ops.activation(x[:, width:], name), reference.activation(x[:, width:], name))
    _close(ops.gelu_and_mul(x, name), reference.gelu_and_mul(x, name), 4)


@pytest.mark.parametrize("width", [96, 21, 1500])
def test_silu_and_mul_is_that_of_the_reference_over_the_whole_range(ops, dtype, width):
    x = _random(5, 3 * width, dtype=dtype)[:, : 2 * width] * 20
    _close(ops.silu_and_mul(x), reference.silu_and_mul(x), 4)


@pytest.mark.parametrize("width", [96, 1100])
def test_tokens_are_replaced_by_their_rows_of_a_table(ops, dtype, width):
    table = _random(50, width, dtype=dtype)
    for kind in (torch.int32, torch.int64):
        ids = torch.tensor([0, 49, 3, 3, 17], dtype=kind, device=DEVICE)
        assert ops.embed(ids, table).equal(reference.embed(ids, table))


@pytest.mark.parametrize("first_row", [0, 40])
def test_tokens_outside_a_table_become_zeros(ops, dtype, first_row):
    table = _random(50, 1100, dtype=dtype)
    for kind in (torch.int32, torch.int64):
        ids = torch.tensor([0, 39, 40, 41, 89, 90, 49, 50, 7], dtype=kind, device=DEVICE)
        expected = reference.embed(ids, table, first_row)
        assert ops.embed(ids, table, first_row).equal(expected)


class _RopeCase:
    """Tokens of some heads, their angles, and a pool of layers in one of its orders."""

    def __init__(self, dtype, heads, kv_heads, head_size, rotated, order="token"):
        self.qkv = _random(7, (heads + 2 * kv_heads) * head_size + 32, dtype=dtype)
        self.heads = (heads + 2 * kv_heads, head_size)
        angles = torch.outer(torch.arange(50.0), torch.arange(rotated // 2) + 0.5)
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
        self.positions = torch.tensor([0, 3, 49, 2, 2, 17, 1], device=DEVICE)
        self.slots = torch.tensor([0, 23, 7, 8, 13, 19, 2], device=DEVICE)
        inner = (4, kv_heads) if order == "token" else (kv_heads, 4)
        pool = torch.zeros((6, 3, 2, *inner, head_size), dtype=dtype, device=DEVICE)
        self.pool = pool if order == "token" else pool.transpose(3, 4)

    def run(self, function, is_neox, norms=None):
        """The product and the pool afterwards."""
        qkv, pool = self.qkv.clone(), self.pool.clone(memory_format=torch.preserve_format)
        assert pool.stride() == self.pool.stride()
        heads = qkv[:, : self.heads[0] * self.heads[1]].unflatten(1, self.heads)
        inputs = heads, self.table, self.positions, pool[:, 1], self.slots, is_neox
        function(*inputs, norms=norms)
        return qkv, pool


@pytest.mark.matrix(keep=14 if IS_INTERPRETED else 60)
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotated"),
    [(4, 2, 16, 16), (32, 8, 128, 128), (6, 1, 80, 80), (5, 5, 64, 16), (3, 1, 96, 24)],
)
def test_rotated_keys_and_values_are_written_to_their_slots_alone(
    ops, dtype, heads, kv_heads, head_size, rotated, is_neox, order
):
    case = _RopeCase(dtype, heads, kv_heads, head_size, rotated, order)

    qkv, pool = case.run(ops.rope_and_cache, is_neox)

    expected_qkv, expected_pool = case.run(reference.rope_and_cache, is_neox)
    _close(qkv, expected_qkv)
    _close(pool, expected_pool)
    # Values and what lies behind the heads are not touched.
    first_value = (heads + kv_heads) * head_size
    assert qkv[:, first_value:].equal(case.qkv[:, first_value:])
    assert pool[:, 1, 1].equal(expected_pool[:, 1, 1])


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotated"),
    [(4, 2, 16, 16), (32, 4, 128, 128), (0, 3, 80, 80), (5, 1, 64, 16)],
)
def test_heads_are_normalised_before_they_are_rotated(
    ops, dtype, heads, kv_heads, head_size, rotated, is_neox
):
    case = _RopeCase(dtype, heads, kv_heads, head_size, rotated)
    weights = (_random(head_size, dtype=dtype, seed=seed) for seed in (3, 4))
    norms = HeadNorms(*weights, 1e-5)

    qkv, pool = case.run(ops.rope_and_cache, is_neox, norms)

    expected_qkv, expected_pool = case.run(reference.rope_and_cache, is_neox, norms)
    _close(qkv, expected_qkv, 8)
    _close(pool, expected_pool, 8)
    assert pool[:, 1, 1].equal(expected_pool[:, 1, 1])


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize(("kv_heads", "head_size"), [(2, 16), (12, 64), (25, 80)])
def test_keys_and_values_are_written_to_their_slots_alone(
    ops, dtype, kv_heads, head_size, order
):
    case = _RopeCase(dtype, 0, kv_heads, head_size, head_size, order)
    heads = case.qkv[:, : 2 * kv_heads * head_size].unflatten(1, (2 * kv_heads, head_size))
    expected = case.pool.clone(memory_format=torch.preserve_format)

    ops.write_kv(heads[:, :kv_heads], heads[:, kv_heads:], case.pool[:, 1], case.slots)

    reference.write_kv(heads[:, :kv_heads], heads[:, kv_heads:], expected[:, 1], case.slots)
    assert case.pool.equal(expected)


def test_a_product_is_added_to_the_residual_or_returned(ops, dtype):
    x, weight = _random(5, 64, dtype=dtype), _random(40, 64, dtype=dtype, seed=1)
    residual = _random(5, 40, dtype=dtype, seed=2)
    total = residual.clone()

    product = ops.add_linear(x, weight, total)

    exact = residual.double() + x.double() @ weight.double().T
    _close(total if product is None else total + product, exact.to(dtype), 8)


def test_a_cached_launch_serves_other_strides_and_alignments(ops):
    flat = _random(4 * 64 + 8, dtype=torch.float16)
    weight = _random(64, dtype=torch.float16, seed=1)
    for _ in range(2):
        # Rows with different strides and alignments, of 64 values and of one value.
        for first, stride, width in ((0, 64, 64), (1, 64, 64), (8, 57, 57), (3, 7, 1)):
            x = flat[first:].as_strided((3, width), (stride, 1), flat[first:].storage_offset())
            expected = reference.rms_norm(x, weight[:width], 1e-5)
            _close(ops.rms_norm(x, weight[:width], 1e-5), expected, 4)
