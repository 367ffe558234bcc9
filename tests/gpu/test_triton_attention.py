"""Triton's paged attention against its torch twin.

On a machine without a GPU the tests run in Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import bisect
import itertools
import os

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.paged_attention import paged_attention
from trimaran.kernels.triton.attention.work_items import MIN_KEYS, SPLIT_COST, plan_work

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
# The interpreter's products of bf16 are not those of the hardware.
DTYPES = [torch.float32, torch.float16] + ([] if IS_INTERPRETED else [torch.bfloat16])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

pytestmark = pytest.mark.gpu

Lengths = list[tuple[int, int]]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


class Batch:
    """Sequences of (cached tokens, queries), decodes first; memory no query reads is NaN."""

    def __init__(
        self, dtype, lengths: Lengths, *, heads=4, kv_heads=2, size=32, block=8, order="token"
    ):
        generator = torch.Generator().manual_seed(len(lengths))
        most = -(-max(past + q for past, q in lengths) // block)
        blocks = torch.randperm(most * len(lengths), generator=generator)
        shape = [len(blocks), 3, 2, block, kv_heads, size]
        if order == "head":
            shape[3], shape[4] = shape[4], shape[3]
        pool = torch.randn(shape, generator=generator)
        if order == "head":
            pool = pool.transpose(3, 4)
        self.tables = blocks.int().view(len(lengths), most)
        self.cache = pool.to(dtype)[:, 1]
        assert self.cache.stride() == pool[:, 1].stride()
        for row, (past, queries) in zip(self.tables, lengths, strict=True):
            for number, place in enumerate(row.tolist()):
                used = past + queries - number * block
                self.cache[place, :, max(0, used) :] = float("nan")
        self.cache = self.cache.to(DEVICE)
        self.lengths = lengths
        total = sum(q for _, q in lengths)
        self.query = torch.randn(total, heads + 3, size, generator=generator)
        self.query = self.query.to(dtype).to(DEVICE)[:, 1 : heads + 1]
        self.scale = size**-0.5

    def hide_past(self, spec: AttentionSpec) -> None:
        """Blocks in front of all windows are freed: their new owners write NaN."""
        block = self.cache.shape[2]
        for row, (past, _) in zip(self.tables.tolist(), self.lengths, strict=True):
            for key in range(spec.num_sinks, past + 1 - spec.window):
                self.cache[row[key // block], :, key % block] = float("nan")

    def metadata(self, first=0, end=None, *, with_rows=False, num_decodes=None, masks=None):
        lengths = self.lengths[first:end]
        chunks = [queries for _, queries in lengths]
        starts = torch.tensor([0, *chunks]).cumsum(0).int()
        lens = torch.tensor([past + queries for past, queries in lengths]).int()
        if num_decodes is None:
            num_decodes = next((i for i, q in enumerate(chunks) if q > 1), len(chunks))
        tables, rows = self.tables[first:end], None
        if with_rows:
            rows = torch.arange(len(lengths)).flip(0).int().to(DEVICE)
            tables = tables.flip(0).contiguous()
        return AttentionMetadata(
            query_start_loc=starts.to(DEVICE),
            seq_lens=lens.to(DEVICE),
            block_tables=tables.to(DEVICE),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(chunks),
            max_seq_len=int(lens.max()),
            num_decodes=num_decodes,
            rows=rows,
            tree_masks=masks,
        )

    def check(self, spec: AttentionSpec, **options) -> torch.Tensor:
        """Compare the whole step, by this metadata, with the reference."""
        masks = options.get("masks")
        plain = self.metadata(num_decodes=0) if masks is None else self.metadata(masks=masks)
        expected = reference.paged_attention(self.query, self.cache, plain, spec)
        if spec.window:
            self.hide_past(spec)
        actual = paged_attention(self.query, self.cache, self.metadata(**options), spec)
        limit = TOLERANCE[actual.dtype]
        torch.testing.assert_close(actual, expected, atol=limit * 2, rtol=limit)
        return actual


CASES: dict[str, Lengths] = {
    "decodes": [(0, 1), (7, 1), (8, 1), (30, 1)],
    "long decodes": [(0, 1), (255, 1), (256, 1), (700, 1)],
    "chunks": [(0, 2), (0, 8), (5, 20), (9, 70), (200, 3)],
    "both": [(300, 1), (3, 1), (0, 40), (64, 64), (130, 5)],
    "padding": [(0, 40), (300, 1), (3, 1), (0, 1), (0, 1), *[(0, 0)] * 39],
}
# Query heads, key-value heads, head size, block.
SHAPES = [(4, 2, 32, 8), (8, 1, 64, 32), (4, 4, 16, 16), (6, 2, 80, 16), (20, 4, 96, 32)]
WIDE = [(32, 8, 128, 32), (2, 1, 256, 64), (40, 1, 64, 16)]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), SHAPES)
def test_attention_is_that_of_the_reference(name, heads, kv_heads, size, block):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    batch = Batch(DTYPES[-1], CASES[name], **shape)
    batch.check(AttentionSpec(scale=batch.scale))


@pytest.mark.parametrize("word", [1, -3, -(1 << 20) | 5, -(1 << 63) | 0x5555])
def test_rows_of_trees_see_the_keys_of_their_masks(word):
    batch = Batch(DTYPES[-1], CASES["long decodes"])
    masks = torch.full((len(CASES["long decodes"]),), word, device=DEVICE)
    masks[1] = -1
    seen = batch.check(AttentionSpec(scale=batch.scale), masks=masks)
    masks = torch.full_like(masks, -1)
    everything = batch.check(AttentionSpec(scale=batch.scale), masks=masks)

    is_same = (seen == everything).flatten(1).all(1)
    assert is_same[1]
    assert not is_same[2:].any()


@pytest.mark.parametrize("order", ["token", "head"])
def test_the_cache_may_have_any_strides(dtype, order):
    batch = Batch(dtype, CASES["both"], order=order)
    batch.check(AttentionSpec(scale=batch.scale))


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block"), WIDE)
def test_attention_of_wide_heads_is_that_of_the_reference(heads, kv_heads, size, block):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    batch = Batch(DTYPES[-1], CASES["both"], **shape, order="head")
    batch.check(AttentionSpec(scale=batch.scale))


@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec(scale=0.3, window=1),
        AttentionSpec(scale=0.3, window=40),
        AttentionSpec(scale=0.3, window=100, num_sinks=4),
        AttentionSpec(scale=0.3, window=17, num_sinks=70),
        AttentionSpec(scale=2.0, soft_cap=1.5),
        AttentionSpec(scale=0.5, window=64, num_sinks=64, soft_cap=20.0),
        AttentionSpec(scale=0.3, window=5000, num_sinks=4),
    ],
    ids=str,
)
def test_windows_sinks_and_caps_are_those_of_the_reference(spec):
    Batch(DTYPES[-1], CASES["long decodes"]).check(spec)
    Batch(DTYPES[-1], CASES["both"]).check(spec)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 1)])
@pytest.mark.parametrize("window", [0, 40])
def test_a_bias_of_positions_is_that_of_the_reference(heads, kv_heads, window):
    bias = torch.randn(heads, 1024, generator=torch.Generator().manual_seed(2))
    spec = AttentionSpec(scale=0.3, window=window, position_bias=bias[:, :701].to(DEVICE))
    for name in ("long decodes", "both"):
        Batch(DTYPES[-1], CASES[name], heads=heads, kv_heads=kv_heads).check(spec)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 1)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"window": 9, "num_sinks": 3}], ids=str
)
def test_a_score_of_no_key_counts_once_in_each_softmax(heads, kv_heads, options):
    logits = torch.randn(heads, generator=torch.Generator().manual_seed(2)) * 2
    spec = AttentionSpec(scale=0.3, sink_logits=logits.to(DEVICE), **options)
    for name in ("long decodes", "both"):
        Batch(DTYPES[-1], CASES[name], heads=heads, kv_heads=kv_heads).check(spec)


def test_sequences_find_their_blocks_by_row():
    batch = Batch(DTYPES[-1], CASES["both"])
    batch.check(AttentionSpec(scale=batch.scale), with_rows=True)


def test_decodes_counted_as_prompts_are_served_too():
    batch = Batch(DTYPES[-1], CASES["both"])
    batch.check(AttentionSpec(scale=batch.scale), num_decodes=0)


@pytest.mark.parametrize("name", ["long decodes", "both"])
def test_a_deterministic_result_has_the_same_bits_without_other_sequences(name):
    batch = Batch(DTYPES[-1], CASES[name])
    spec = AttentionSpec(scale=batch.scale)
    together = paged_attention(
        batch.query, batch.cache, batch.metadata(), spec, is_deterministic=True
    )
    first = 0
    for number, (_, queries) in enumerate(batch.lengths):
        tokens = slice(first, first + queries)
        alone = paged_attention(
            batch.query[tokens], batch.cache, batch.metadata(number, number + 1), spec,
            is_deterministic=True,
        )  # fmt: skip
        assert alone.equal(together[tokens]), batch.lengths[number]
        first += queries


def test_a_long_sequence_beside_short_sequences_has_more_splits():
    batch = Batch(torch.float16, [(2000, 1), (3, 1), (3, 1)], block=16)
    metadata = batch.metadata()
    paged_attention(batch.query, batch.cache, metadata, AttentionSpec(scale=batch.scale))
    (plan,) = metadata.plans.values()
    splits = plan.splits[1 : 1 + int(plan.splits[0, 0])]
    assert splits[:, 0].bincount().tolist()[1:] == [1, 1]
    assert int((splits[:, 0] == 0).sum()) >= 8
    assert int((splits[:, 3] - splits[:, 2]).sum()) == 2001 + 4 + 4
    assert int(plan.counters.abs().max()) == 0


def test_a_plan_serves_all_layers_of_a_step():
    batch = Batch(DTYPES[-1], CASES["both"])
    spec = AttentionSpec(scale=batch.scale)
    metadata = batch.metadata()
    first = paged_attention(batch.query, batch.cache, metadata, spec)
    plans = dict(metadata.plans)
    assert paged_attention(batch.query, batch.cache, metadata, spec).equal(first)
    assert metadata.plans == plans


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize(
    "lengths", [[1], [64], [65], [5000], [3] * 40, [700, 1, 64, 129, 4000, 2], [256] * 70]
)
def test_every_key_is_in_one_split_and_every_split_in_one_program(lengths, is_fixed):
    lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    metadata = AttentionMetadata(
        query_start_loc=torch.arange(len(lengths) + 1, device=DEVICE).int(),
        seq_lens=lens,
        block_tables=lens.view(-1, 1),
        slot_mapping=lens,
        max_query_len=1,
        max_seq_len=max(lengths),
        num_decodes=len(lengths),
    )
    plan = plan_work(metadata, (8, 2, 16), len(lengths), 40, 32, is_fixed=is_fixed)
    num_items, num_splits = plan.items[:2].tolist()
    firsts = plan.items[2 : 3 + num_items].tolist()
    assert firsts[-1] == num_splits
    assert firsts[0] == 0
    assert all(first < end for first, end in itertools.pairwise(firsts))
    covered = dict.fromkeys(range(len(lengths)), 0)
    keys = [0] * num_items
    for number in range(firsts[-1]):
        sequence, row, start, end, head, count, *_ = plan.splits[number].tolist()
        assert row == sequence
        assert start == covered[sequence]
        assert start % 32 == 0
        assert head <= number < head + count
        covered[sequence] = end
        keys[bisect.bisect_right(firsts, number) - 1] += end - start
    assert list(covered.values()) == lengths
    assert int(plan.counters.abs().max()) == 0
    is_whole = firsts[-1] == len(lengths)
    if not is_fixed and not is_whole:
        assert num_items <= 20
        even = max(sum(lengths) + SPLIT_COST * len(lengths), 20 * MIN_KEYS) / 20
        assert max(keys) <= even + 32


def test_sequences_are_split_only_when_splits_save_time():
    def num_splits(lengths):
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        batch = Batch(torch.float16, [(0, 1)] * len(lengths))
        metadata = batch.metadata()
        metadata.seq_lens = lens
        plan = plan_work(metadata, (8, 2, 16), len(lengths), 40, 32, is_fixed=False)
        return int(plan.items[1])

    assert num_splits([256] * 40) == 40
    assert num_splits([256]) == 1
    assert num_splits([5000]) == 20
    assert num_splits([1500] * 21) == 21
    assert num_splits([2500] * 21) > 21
    assert num_splits([4000, 4000, 200] * 14) > 42
    assert num_splits([9000] + [100] * 39) > 45
