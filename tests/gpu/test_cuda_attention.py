"""The CUDA C++ attention of prompts against its torch twin."""

from __future__ import annotations

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.cuda import attention as cuda_attention

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Relative to the norm of the result, like the rounding error of these dtypes.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


def metadata_of(lengths, tables, *, num_decodes=0, rows=None):
    chunks = [queries for _, queries in lengths]
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *chunks]).cumsum(0).int().to(DEVICE),
        seq_lens=torch.tensor([past + q for past, q in lengths]).int().to(DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=max(chunks),
        max_seq_len=max(past + q for past, q in lengths),
        num_decodes=num_decodes,
        rows=rows,
    )


def cache_of(lengths, dtype, *, kv_heads=2, size=128, block=32, order="token"):
    """A layer's cache and its tables. All memory that holds no token is NaN."""
    generator = torch.Generator().manual_seed(len(lengths))
    most = -(-max(past + q for past, q in lengths) // block)
    blocks = torch.randperm(most * len(lengths), generator=generator)
    shape = [len(blocks), 2, 2, block, kv_heads, size]
    if order == "head":
        shape[3], shape[4] = shape[4], shape[3]
    pool = torch.randn(shape, generator=generator)
    if order == "head":
        pool = pool.transpose(3, 4)
    pool = pool.to(dtype)
    tables = blocks.int().view(len(lengths), most)
    for row, (past, queries) in zip(tables, lengths, strict=True):
        for number, place in enumerate(row.tolist()):
            pool[place, :, :, max(0, past + queries - number * block) :] = float("nan")
        row[-(-(past + queries) // block) :] = 1_000_000
    return pool.to(DEVICE)[:, 1], tables


def queries_of(lengths, dtype, heads, size):
    """Queries within the product that holds keys and values too."""
    generator = torch.Generator().manual_seed(7)
    total = sum(queries for _, queries in lengths)
    product = torch.randn(total, heads + 3, size, generator=generator)
    return product.to(dtype).to(DEVICE)[:, :heads]


def twin(query, cache, metadata, spec):
    clean = cache.float().nan_to_num()
    tables = metadata.block_tables.clamp(max=cache.shape[0] - 1)
    exact = AttentionMetadata(
        query_start_loc=metadata.query_start_loc, seq_lens=metadata.seq_lens,
        block_tables=tables, slot_mapping=metadata.slot_mapping,
        max_query_len=metadata.max_query_len, max_seq_len=metadata.max_seq_len,
        rows=metadata.rows,
    )  # fmt: skip
    return reference.paged_attention(query.float(), clean, exact, spec)


def hide_past(cache, metadata, spec):
    """Blocks in front of all windows are freed: their new owners write NaN."""
    block = cache.shape[2]
    counts = metadata.query_start_loc.diff()
    tables = metadata.tables().tolist()
    for row, past in zip(tables, (metadata.seq_lens - counts).tolist(), strict=True):
        for key in range(spec.num_sinks, past + 1 - spec.window):
            cache[row[key // block], :, key % block] = float("nan")


def check(
    lengths, dtype, *, heads=8, size=128, num_decodes=0, rows=None, window=0, sinks=0, **layout
):
    cache, tables = cache_of(lengths, dtype, size=size, **layout)
    query = queries_of(lengths, dtype, heads, size)
    if rows is not None:
        tables = tables[rows.argsort()]
        rows = rows.int().to(DEVICE)
    metadata = metadata_of(lengths, tables, num_decodes=num_decodes, rows=rows)
    spec = AttentionSpec(scale=size**-0.5, window=window, num_sinks=sinks)
    assert cuda_attention.refusal(query, cache, spec) is None
    output = torch.full(query.shape, float("nan"), dtype=dtype, device=DEVICE)
    wanted = twin(query, cache, metadata, spec)[num_decodes:]
    if window:
        hide_past(cache, metadata, spec)
    cuda_attention.prefill(query, cache, metadata, spec, output)
    found = output[num_decodes:].float()
    assert output[:num_decodes].isnan().all()
    assert (found - wanted).norm() <= TOLERANCE[dtype] * wanted.norm()
    assert (found - wanted).abs().max() <= 10 * TOLERANCE[dtype]


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 128)],
        [(0, 1)],
        [(0, 2048)],
        [(0, 127), (0, 129), (0, 33), (0, 500)],
        [(1000, 100), (31, 2), (0, 700), (128, 128), (127, 300)],
        [(0, n) for n in range(1, 140, 7)],
        # Padding like in graphs of such steps: padding tokens, then sequences without tokens.
        [(700, 1), (3, 1), (0, 467), *[(0, 1)] * 43, *[(0, 0)] * 466],
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [128, 64])
def test_batches_of_any_lengths_agree_with_the_torch_twin(dtype, size, lengths):
    check(lengths, dtype, size=size)


@pytest.mark.parametrize("heads", [2, 6, 14, 16, 64])
def test_any_number_of_heads_shares_a_key_value_head(dtype, heads):
    check([(0, 200), (77, 150)], dtype, heads=heads)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("order", ["token", "head"])
def test_blocks_of_any_size_and_order_are_read(dtype, block, order):
    check([(0, 300), (250, 170)], dtype, block=block, order=order)
    check([(0, 300), (250, 170)], dtype, block=block, order=order, size=64)


@pytest.mark.parametrize("window", [1, 31, 128, 129, 300, 5000])
@pytest.mark.parametrize("sinks", [0, 4, 200])
def test_windows_and_sinks_hide_the_keys_between(dtype, window, sinks):
    lengths = [(0, 700), (1000, 130), (0, 1), (37, 64), (600, 500)]
    check(lengths, dtype, window=window, sinks=sinks)
    check(lengths, dtype, window=window, sinks=sinks, size=64, heads=2)


def test_decode_rows_before_the_prompts_are_not_written(dtype):
    check([(40, 1), (700, 1), (3, 1), (0, 300), (250, 170)], dtype, num_decodes=3)


def test_block_tables_are_found_by_row(dtype):
    check([(0, 300), (250, 170), (5, 64)], dtype, rows=torch.tensor([2, 0, 1]))


def test_a_plan_serves_all_layers_and_many_launches(dtype):
    lengths = [(0, 1500), (0, 60), (300, 900)]
    cache, tables = cache_of(lengths, dtype)
    query = queries_of(lengths, dtype, 8, 128)
    metadata = metadata_of(lengths, tables)
    spec = AttentionSpec(scale=0.1)
    results = []
    for _ in range(20):
        output = torch.full(query.shape, float("nan"), dtype=dtype, device=DEVICE)
        cuda_attention.prefill(query, cache, metadata, spec, output)
        results.append(output)
    assert len(metadata.plans) == 1
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_sequences_result_does_not_depend_on_other_sequences_or_its_chunks(dtype):
    lengths = [(0, 700), (0, 333), (64, 128)]
    cache, tables = cache_of(lengths, dtype)
    query = queries_of(lengths, dtype, 8, 128)
    spec = AttentionSpec(scale=0.1)
    together = torch.empty(query.shape, dtype=dtype, device=DEVICE)
    cuda_attention.prefill(query, cache, metadata_of(lengths, tables), spec, together)
    for past, count in ((0, 333), (0, 100), (100, 233)):
        alone = torch.empty((count, *query.shape[1:]), dtype=dtype, device=DEVICE)
        part = query[700 + past : 700 + past + count]
        metadata = metadata_of([(past, count)], tables[1:2])
        cuda_attention.prefill(part, cache, metadata, spec, alone)
        assert torch.equal(alone, together[700 + past : 700 + past + count])


def test_the_refusal_names_the_unsupported_feature():
    cache, _ = cache_of([(0, 64)], torch.bfloat16, size=80)
    query = queries_of([(0, 64)], torch.bfloat16, 8, 80)
    assert cuda_attention.refusal(query, cache, AttentionSpec(scale=1)) == "heads of 80"
    query, cache = query[:, :, :64].contiguous(), cache[..., :64].contiguous()
    assert cuda_attention.refusal(query, cache, AttentionSpec(scale=1)) is None
    capped = AttentionSpec(scale=1, soft_cap=30)
    assert cuda_attention.refusal(query, cache, capped) == "a soft cap"
    biased = AttentionSpec(scale=1, position_bias=torch.zeros(8, 64, device=query.device))
    assert cuda_attention.refusal(query, cache, biased) == "a bias of positions"
    assert "float32" in str(cuda_attention.refusal(query.float(), cache, capped))
