"""Kernels over a KV cache of one byte a number, against their torch twins.

On a machine without a GPU the tests run in Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.kv_quantization import KV_DTYPES, head_scales
from trimaran.kernels.paged_attention import paged_attention
from trimaran.kernels.triton import rotary

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter's products of bf16 are not those of the hardware.
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.gpu

Lengths = list[tuple[int, int]]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_scales(num_kv):
    """Scales of heads, all different."""
    scales = head_scales(draw(num_kv, seed=1).exp() / 90, draw(num_kv, seed=2).exp() / 90)
    return scales.to(DEVICE)


class Batch:
    """Sequences of (cached tokens, queries) over a quantized pool whose unused bytes are 255:
    NaN in FP8."""

    def __init__(self, kind, dtype, lengths: Lengths, *, heads=4, kv_heads=2, size=32, block=8):
        most = -(-max(past + q for past, q in lengths) // block)
        order = torch.Generator().manual_seed(3)
        blocks = torch.randperm(most * len(lengths), generator=order)
        self.tables = blocks.int().view(len(lengths), most)
        self.lengths, self.kind = lengths, KV_DTYPES[kind]
        pool = torch.full((len(blocks), 2, kv_heads, block, size), 255, dtype=torch.uint8)
        # In memory the tokens of a head are adjacent.
        self.cache = pool.to(DEVICE).view(self.kind).transpose(2, 3)
        self.scales = draw_scales(kv_heads)
        for number, (past, queries) in enumerate(lengths):
            count = past + queries
            slots = (
                self.tables[number].long()[:, None] * block + torch.arange(block)
            ).flatten()
            key, value = (
                draw(count, kv_heads, size, seed=10 * number + each) for each in (1, 2)
            )
            reference.write_kv(
                key.to(DEVICE), value.to(DEVICE), self.cache, slots[:count].to(DEVICE),
                self.scales,
            )  # fmt: skip
        total = sum(q for _, q in lengths)
        self.query = draw(total, heads + 3, size, seed=4).to(dtype).to(DEVICE)[:, 1 : heads + 1]

    def metadata(self, *, num_decodes=None):
        chunks = [queries for _, queries in self.lengths]
        lens = [past + queries for past, queries in self.lengths]
        if num_decodes is None:
            num_decodes = next((i for i, q in enumerate(chunks) if q > 1), len(chunks))
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *chunks]).cumsum(0).int().to(DEVICE),
            seq_lens=torch.tensor(lens).int().to(DEVICE),
            block_tables=self.tables.to(DEVICE),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(chunks),
            max_seq_len=max(lens),
            num_decodes=num_decodes,
        )

    def spec(self, **values) -> AttentionSpec:
        scale = self.query.shape[2] ** -0.5
        return AttentionSpec(scale=scale, kv_scales=self.scales, **values)

    def check(self, spec: AttentionSpec, attend=paged_attention, **options) -> None:
        expected = reference.paged_attention(self.query, self.cache, self.metadata(), spec)
        actual = attend(self.query, self.cache, self.metadata(), spec, **options)
        limit = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual, expected, atol=limit * 2, rtol=limit)


CASES: dict[str, Lengths] = {
    "decodes": [(0, 1), (7, 1), (8, 1), (30, 1), (700, 1)],
    "both": [(300, 1), (3, 1), (0, 40), (64, 64), (130, 5)],
}


@pytest.fixture(params=KV_DTYPES)
def kind(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.mark.matrix(keep=5 if IS_INTERPRETED else 24)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block"), [(4, 2, 32, 8), (6, 2, 80, 16), (8, 2, 128, 32)]
)
def test_attention_is_that_of_the_reference(kind, dtype, name, heads, kv_heads, size, block):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    batch = Batch(kind, dtype, CASES[name], **shape)
    batch.check(batch.spec())


@pytest.mark.matrix(keep=3 if IS_INTERPRETED else 12)
@pytest.mark.parametrize(
    "limits",
    [
        {"window": 17, "num_sinks": 9, "soft_cap": 1.5},
        {"window": 40},
        {"window": 17, "num_sinks": 9},
        {"soft_cap": 1.5},
    ],
    ids=str,
)
def test_windows_sinks_and_caps_are_those_of_the_reference(kind, dtype, limits):
    for lengths in CASES.values():
        batch = Batch(kind, dtype, lengths)
        batch.check(batch.spec(**limits))


def test_a_deterministic_result_is_that_of_the_reference(kind, dtype):
    batch = Batch(kind, dtype, CASES["both"])
    batch.check(batch.spec(), is_deterministic=True)


def stored(kind, num_tokens, num_kv, size, write) -> torch.Tensor:
    """The bytes of a cache after ``write(cache, slots)``; all others stay 255."""
    cache = torch.full((6, 2, num_kv, 8, size), 255, dtype=torch.uint8, device=DEVICE)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(3))[:num_tokens]
    write(cache.view(KV_DTYPES[kind]).transpose(2, 3), slots.to(DEVICE))
    return cache


def draw_heads(kind, num_kv, *shape, dtype):
    """Scales of heads, and keys or values to round; in the interpreter, whose FP8 rounding is
    not a GPU's, numbers that FP8 holds."""
    x = 4 * draw(*shape, seed=5)
    if kind == "int8" or not IS_INTERPRETED:
        return draw_scales(num_kv), x.to(dtype).to(DEVICE)
    powers = 2.0 ** -torch.arange(2.0 * num_kv).view(2, num_kv)
    return head_scales(*powers), (x.to(torch.float8_e4m3fn).float() / 4).to(dtype)


def same(kind, found, expected):
    """Bytes are equal; in the interpreter small FP8 numbers, below 2**-6, may be off by one."""
    if IS_INTERPRETED and kind == "fp8":
        found, expected = (x.view(KV_DTYPES[kind]).float() for x in (found, expected))
        torch.testing.assert_close(found, expected, equal_nan=True, atol=2.0**-9, rtol=0)
    else:
        assert found.equal(expected)


def neighbours(kind, found, expected):
    """Numbers differ by one step at most; in the interpreter FP8 by its missing carry."""
    found, expected = (x.view(KV_DTYPES[kind]).float() for x in (found, expected))
    step = {"atol": 1.0, "rtol": 0}
    if kind == "fp8":
        step = {"atol": 2.0**-9, "rtol": 0.5 if IS_INTERPRETED else 2.0**-3}
    torch.testing.assert_close(found, expected, equal_nan=True, **step)


@pytest.mark.parametrize("size", [32, 80])
def test_written_keys_and_values_are_those_of_the_reference(kind, dtype, size):
    scales, (key, value) = draw_heads(kind, 3, 2, 20, 3, size, dtype=dtype)
    # Beyond the range: the largest number is stored.
    key[0, 0, :4] = torch.tensor([256.0, -256.0, 0.0, 1e4]).to(key)
    bytes_of = {
        name: stored(
            kind, 20, 3, size,
            lambda cache, slots, writer=writer: writer(key, value, cache, slots, scales),
        )
        for name, writer in (("ours", rotary.write_kv), ("twin", reference.write_kv))
    }  # fmt: skip
    same(kind, bytes_of["ours"], bytes_of["twin"])


@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (80, 20)])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotated_keys_are_quantized_as_by_the_reference(kind, dtype, size, rotated, is_neox):
    scales, heads = draw_heads(kind, 2, 20, 4 + 2 * 2, size, dtype=dtype)
    angles = draw(64, rotated // 2, seed=7)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.arange(20, device=DEVICE)
    results = {}
    for name, ops in (("ours", rotary), ("twin", reference)):
        x = heads.clone()
        written = stored(
            kind, 20, 2, size,
            lambda cache, slots, x=x, ops=ops: ops.rope_and_cache(
                x, table, positions, cache, slots, is_neox, scales
            ),
        )  # fmt: skip
        results[name] = x, written
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(results["ours"][0], results["twin"][0], atol=limit, rtol=limit)
    found, expected = results["ours"][1], results["twin"][1]
    # A rotated key may differ by its last bit, and then rounds to a neighbour.
    neighbours(kind, found, expected)
    same(kind, found[:, 1], expected[:, 1])
