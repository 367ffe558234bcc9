"""Latent attention on a GPU against its torch twin: products of heads, the cache, attention.

On a machine without a GPU the tests run in Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import (
    AttentionMetadata,
    AttentionSpec,
    LatentHeads,
    LatentRows,
    Rotation,
)
from trimaran.kernels.gpu import TritonOps

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter's products of bf16 are not those of the hardware.
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

pytestmark = [pytest.mark.gpu]

Lengths = list[tuple[int, int]]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def _close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    limit = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=limit * scale, rtol=limit)


class Batch:
    """Sequences of (cached tokens, queries), decodes first; memory of no token is NaN."""

    def __init__(self, dtype, lengths: Lengths, heads: int, latent: int, rotated: int, block=4):
        most = -(-max(past + queries for past, queries in lengths) // block)
        order = torch.randperm(most * len(lengths), generator=torch.Generator().manual_seed(1))
        self.tables, self.lengths = order.int().view(len(lengths), most), lengths
        size = latent + rotated
        pool = _random(len(order), 3, 1, block, 1, size, dtype=dtype)
        self.cache = pool[:, 1]
        for row, (past, queries) in zip(self.tables, lengths, strict=True):
            for number, place in enumerate(row.tolist()):
                used = past + queries - number * block
                self.cache[place, :, max(0, used) :] = float("nan")
        tokens = sum(queries for _, queries in lengths)
        self.query = _random(tokens, heads + 2, size, dtype=dtype, seed=1)[:, :heads]
        self.scale, self.latent = size**-0.5, latent

    def own_vectors(self) -> torch.Tensor:
        """The step's cache entries, as a part of wider rows."""
        rows = []
        for table, (past, queries) in zip(self.tables, self.lengths, strict=True):
            for place in range(past, past + queries):
                block, offset = divmod(place, self.cache.shape[2])
                rows.append(self.cache[int(table[block]), 0, offset, 0])
        wide = torch.stack(rows).repeat(1, 2)
        return wide[:, wide.shape[1] // 2 :]

    def metadata(self, num_decodes: int | None = None, *, with_rows=False) -> AttentionMetadata:
        chunks = [queries for _, queries in self.lengths]
        lens = [past + queries for past, queries in self.lengths]
        if num_decodes is None:
            num_decodes = next((i for i, q in enumerate(chunks) if q > 1), len(chunks))
        tables, rows = self.tables.to(DEVICE), None
        if with_rows:
            rows = torch.arange(len(lens)).flip(0).int().to(DEVICE)
            tables = tables.flip(0).contiguous()
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *chunks]).cumsum(0).int().to(DEVICE),
            seq_lens=torch.tensor(lens).int().to(DEVICE),
            block_tables=tables,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(chunks),
            max_seq_len=max(lens),
            num_decodes=num_decodes,
            rows=rows,
        )

    def check(self, spec: AttentionSpec, ops: TritonOps | None = None, **options) -> None:
        """Compare the whole step, by this metadata, with the reference."""
        expected = reference.paged_attention(self.query, self.cache, self.metadata(0), spec)
        metadata = self.metadata(**options)
        actual = (ops or TritonOps()).paged_attention(self.query, self.cache, metadata, spec)
        _close(actual, expected, 2)


CASES: dict[str, Lengths] = {
    "decodes": [(0, 1), (7, 1), (140, 1)],
    "many decodes": [(number % 50, 1) for number in range(140)],
    "both": [(140, 1), (3, 1), (0, 20), (30, 9)],
}
# Query heads, dims of a latent vector and of a rotated key.
SHAPES = [(12, 36, 8)] if IS_INTERPRETED else [(12, 36, 8), (16, 512, 64), (128, 512, 64)]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("heads", "latent", "rotated"), SHAPES)
def test_attention_is_that_of_the_reference(dtype, name, heads, latent, rotated):
    batch = Batch(dtype, CASES[name], heads, latent, rotated)
    batch.check(AttentionSpec(scale=batch.scale, latent_size=latent))


def test_windows_sinks_and_caps_are_those_of_the_reference():
    seen = {"window": 20, "num_sinks": 6, "soft_cap": 1.5}
    spec = AttentionSpec(scale=0.3, latent_size=36, **seen)
    Batch(DTYPES[-1], CASES["both"], 5, 36, 8).check(spec)


def test_sequences_find_their_blocks_by_row():
    spec = AttentionSpec(scale=0.3, latent_size=36)
    Batch(DTYPES[-1], CASES["both"], 5, 36, 8).check(spec, with_rows=True)


def test_a_sequence_in_deterministic_mode_does_not_depend_on_other_sequences():
    ops, spec = TritonOps(is_deterministic=True), AttentionSpec(scale=0.3, latent_size=36)
    batch = Batch(DTYPES[-1], CASES["both"], 5, 36, 8)
    batch.check(spec, ops)
    together = ops.paged_attention(batch.query, batch.cache, batch.metadata(), spec)

    batch.lengths, batch.tables = batch.lengths[:1], batch.tables[:1]
    alone = ops.paged_attention(batch.query[:1], batch.cache, batch.metadata(), spec)

    assert alone.equal(together[:1])


def _heads(batch: Batch, plain: int, values: int) -> LatentHeads:
    latent, dtype, heads = batch.latent, batch.cache.dtype, batch.query.shape[1]
    return LatentHeads(
        _random(heads, latent, plain, dtype=dtype, seed=2) / latent**0.5,
        _random(heads, values, latent, dtype=dtype, seed=3) / latent**0.5,
    )


@pytest.mark.parametrize(
    ("lengths", "has_past"),
    [
        ([(9, 1), (0, 3), (0, 40)], False),
        ([(9, 1), (40, 1), (0, 20), (13, 9)], True),
    ],
    ids=["first chunks", "later chunks"],
)
@pytest.mark.parametrize("dtype", DTYPES[IS_INTERPRETED:], ids=str)
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(3, 36, 8), *SHAPES[1:]])
def test_attention_of_prompts_uses_uncompressed_keys_and_values(
    dtype, lengths, has_past, heads, latent, rotated
):
    plain, values = (20, 12) if latent < 64 else (128, 128)
    batch = Batch(dtype, lengths, heads, latent, rotated)
    tokens, own, metadata = batch.query.shape[0], batch.own_vectors(), batch.metadata()
    metadata.has_past = has_past
    query = _random(tokens, heads + 1, plain + rotated, dtype=dtype, seed=4)[:, :heads]
    spec = AttentionSpec(scale=(plain + rotated) ** -0.5, latent_size=latent)
    inputs = query, own[:, :latent], own[:, latent:], batch.cache

    actual = TritonOps().latent_attention(*inputs, metadata, spec, _heads(batch, plain, values))

    expected = reference.latent_attention(
        *inputs, batch.metadata(0), spec, _heads(batch, plain, values)
    )
    _close(actual, expected, 4)


@pytest.mark.matrix(keep=8 if IS_INTERPRETED else 27)
@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize(
    ("heads", "size", "width", "outputs"), [(3, 28, 20, 36), (2, 96, 64, 128), (5, 48, 48, 20)]
)
def test_heads_are_multiplied_by_their_own_matrices(dtype, tokens, heads, size, width, outputs):
    x = _random(tokens, heads, size + 4, dtype=dtype)[..., :size]
    weight = (_random(heads, width, outputs, dtype=dtype) / width**0.5).transpose(1, 2)

    actual = TritonOps().head_linear(x, weight)

    _close(actual, reference.head_linear(x, weight), 4)
    assert actual[..., outputs:].equal(x[..., width:])
    fixed = TritonOps(is_deterministic=True)
    assert fixed.head_linear(x[:1], weight).equal(fixed.head_linear(x, weight)[:1])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("heads", [12, 100])
def test_latent_vectors_and_rotated_keys_are_written_to_their_slots(dtype, is_neox, heads):
    latent, rotated = 36, 8
    query = _random(7, heads, 20 + rotated, dtype=dtype)
    vectors = _random(7, 40 + latent + rotated, dtype=dtype, seed=1)
    pool = torch.zeros((6, 3, 1, 4, 1, latent + rotated), dtype=dtype, device=DEVICE)
    angles = _random(50, rotated, dtype=torch.float32)
    positions = torch.tensor([0, 3, 49, 2, 2, 17, 1]).to(DEVICE)
    slots = torch.tensor([5, 3, 23, 8, 9, 1, 20]).to(DEVICE)
    results = []
    for ops in (TritonOps(), reference):
        mine = query.clone(), vectors.clone(), pool.clone()
        parts = mine[1][:, 40 : 40 + latent], mine[1][:, 40 + latent :]
        ops.rope_and_cache_latent(
            mine[0], *parts, angles, positions, mine[2][:, 1], slots, is_neox
        )
        results.append(mine)

    for ours, theirs in zip(*results, strict=True):
        _close(ours, theirs, 2)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "plain", "values"),
    [(3, 36, 8, 20, 12), (5, 64, 16, 64, 32)]
    + ([] if IS_INTERPRETED else [(16, 512, 64, 128, 128)]),
)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_decodes_normalise_rotate_store_and_attend_as_separate_operators(
    dtype, is_neox, heads, latent, rotated, plain, values, tokens
):
    batch = Batch(dtype, [(9 + 3 * n, 1) for n in range(tokens)], heads, latent, rotated)
    metadata = batch.metadata()
    last = [(table, past) for table, (past, _) in zip(batch.tables, batch.lengths, strict=True)]
    slots = [int(table[past // 4]) * 4 + past % 4 for table, past in last]
    metadata.slot_mapping = torch.tensor(slots).to(DEVICE)
    spec = AttentionSpec(scale=(plain + rotated) ** -0.5, latent_size=latent)
    wide = _random(tokens, heads * (plain + rotated) + latent + rotated, dtype=dtype, seed=5)
    angles = _random(200, rotated, dtype=torch.float32, seed=6)
    positions = torch.tensor([past for _, past in last]).to(DEVICE)
    norm, matrices = _random(latent, dtype=dtype, seed=7), _heads(batch, plain, values)
    results = []
    for ops in (TritonOps(), None):
        cache, mine = batch.cache.clone(), wide.clone()
        query, vector, key = mine.split([heads * (plain + rotated), latent, rotated], dim=1)
        query = query.view(tokens, heads, plain + rotated)
        if ops is not None:
            rows = LatentRows(query, vector, key, norm, 1e-6)
            rotation = Rotation(angles, positions, is_neox)
            output = ops.decoded_latents(rows, rotation, cache, metadata, spec, matrices)
            assert output is not None
        else:
            vector = reference.rms_norm(vector, norm, 1e-6)
            reference.rope_and_cache_latent(
                query, vector, key, angles, positions, cache, metadata.slot_mapping, is_neox
            )
            output = reference.latent_attention(
                query, vector, key, cache, batch.metadata(0), spec, matrices
            )
        results.append((output, cache.nan_to_num()))

    for ours, theirs in zip(*results, strict=True):
        _close(ours, theirs, 4)


def test_prompts_and_fixed_sums_have_no_joint_operator():
    batch = Batch(DTYPES[-1], CASES["both"], 5, 36, 8)
    rows = LatentRows(batch.query, *[batch.query] * 3, 1e-6)
    inputs = rows, Rotation(batch.query, batch.query, True), batch.cache, batch.metadata()
    spec, heads = AttentionSpec(scale=0.3, latent_size=36), _heads(batch, 20, 12)
    assert TritonOps().decoded_latents(*inputs, spec, heads) is None
    decodes = Batch(DTYPES[-1], CASES["decodes"], 5, 36, 8).metadata()
    fixed = TritonOps(is_deterministic=True)
    assert fixed.decoded_latents(*inputs[:3], decodes, spec, heads) is None
