"""The CUDA C++ attention of decodes against its torch twin."""

from __future__ import annotations

import random

import pytest
import torch

from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionMetadata, AttentionSpec, HeadNorms
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.decode_attention import HopperDecodes
from trimaran.kernels.triton import rotary as triton_rotary
from trimaran.kernels.triton.norm import norm_heads

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
# Relative to the norm of the result, like the rounding error of these dtypes.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 8e-4}


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request):
    return request.param


class Step:
    """Decodes over a cache whose memory is NaN where it holds no token."""

    shares_reads = False

    def __init__(
        self, dtype, lengths, *, heads=8, kv_heads=2, size=128, block=32, order="head"
    ):
        generator = torch.Generator().manual_seed(len(lengths))
        counts = [-(-length // block) for length in lengths]
        order_of_blocks = torch.randperm(sum(counts), generator=generator).int()
        shape = [sum(counts), 2, 2, block, kv_heads, size]
        if order == "head":
            shape[3], shape[4] = shape[4], shape[3]
        pool = torch.randn(shape, generator=generator).to(dtype)
        if order == "head":
            pool = pool.transpose(3, 4)
        self.tables = torch.full((len(lengths), max(counts) + 1), 1_000_000).int()
        first = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = order_of_blocks[first : first + count]
            self.tables[row, :count] = blocks
            if length % block:
                pool[int(blocks[-1]), :, :, length % block :] = float("nan")
            first += count
        self.cache = pool.to(DEVICE)[:, 1]
        product = torch.randn(len(lengths), heads + 3, size, generator=generator)
        self.query = product.to(dtype).to(DEVICE)[:, :heads]
        self.lengths = lengths
        self.spec = AttentionSpec(scale=size**-0.5)

    def metadata(self, first=0, end=None, *, rows=None):
        lens = torch.tensor(self.lengths[first:end]).int().to(DEVICE)
        tables = self.tables[first:end]
        if rows is not None:
            tables = tables[rows.argsort()]
        return AttentionMetadata(
            query_start_loc=torch.arange(len(lens) + 1).int().to(DEVICE),
            seq_lens=lens,
            block_tables=tables.to(DEVICE),
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=max(self.lengths[first:end]),
            num_decodes=len(lens),
            rows=None if rows is None else rows.int().to(DEVICE),
        )

    def run(self, metadata=None, *, query=None, is_fixed=False):
        query = self.query if query is None else query
        assert cuda_decode.refusal(query, self.cache, self.spec) is None
        output = torch.full(query.shape, float("nan"), dtype=query.dtype, device=DEVICE)
        metadata = metadata or self.metadata()
        cuda_decode.decode(
            query, self.cache, metadata, self.spec, output, is_fixed=is_fixed,
            shares_reads=self.shares_reads,
        )  # fmt: skip
        return output

    def check(self, found):
        clean = self.cache.float().nan_to_num()
        metadata = self.metadata()
        metadata.block_tables = metadata.block_tables.clamp(max=clean.shape[0] - 1)
        wanted = reference.paged_attention(self.query.float(), clean, metadata, self.spec)
        limit = TOLERANCE[found.dtype]
        assert (found.float() - wanted).norm() <= limit * wanted.norm()
        assert (found.float() - wanted).abs().max() <= 10 * limit


LENGTHS = [
    [1], [64], [256], [5000], [3] * 40, [1, 31, 32, 33, 64, 65, 700, 2000],
    [300] * 64 + [9000] + [1] * 30, [129] * 200,
]  # fmt: skip


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_any_lengths_agree_with_the_torch_twin(dtype, lengths, is_fixed):
    step = Step(dtype, lengths)
    step.check(step.run(is_fixed=is_fixed))


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (32, 8, 128),
        (8, 8, 64),
        (16, 2, 128),
        (6, 2, 64),
        (5, 1, 64),
        (8, 8, 96),
        (14, 2, 96),
        (32, 32, 128),
        (7, 1, 128),
    ],
)
def test_shapes_and_strides_agree_with_the_torch_twin(
    dtype, heads, kv_heads, size, block, order
):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    step = Step(dtype, [1, 70, 2000, 255, 256, 257], **shape, order=order)
    step.check(step.run())


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_agree_with_the_torch_twin(dtype, seed):
    draw = random.Random(seed)
    most = draw.choice([40, 300, 3000])
    lengths = [draw.randint(1, most) for _ in range(draw.choice([1, 5, 50, 300]))]
    group = draw.randint(1, 8)
    kv_heads = draw.randint(1, 6)
    shape = {
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
        "size": draw.choice([64, 96, 128]),
    }
    step = Step(dtype, lengths, **shape, block=draw.choice([8, 16, 32, 64]))
    step.check(step.run())


def test_sequences_find_their_blocks_by_row(dtype):
    step = Step(dtype, [5, 70, 300, 41])
    step.check(step.run(step.metadata(rows=torch.tensor([2, 0, 3, 1]))))


def test_a_result_is_the_same_in_every_run_and_layer_of_a_step(dtype):
    step = Step(dtype, [700, 3, 9000, 250] * 9)
    metadata = step.metadata()
    first = step.run(metadata)
    for _ in range(20):
        assert step.run(metadata).equal(first)
    assert step.run().equal(first)


def test_a_deterministic_result_does_not_depend_on_other_sequences(dtype):
    step = Step(dtype, [700, 3, 9000, 1024, 1025, 250])
    together = step.run(is_fixed=True)
    for number in range(len(step.lengths)):
        one = slice(number, number + 1)
        alone = step.run(
            step.metadata(number, number + 1), query=step.query[one], is_fixed=True
        )
        assert alone.equal(together[one]), step.lengths[number]


def test_a_graph_serves_other_lengths_than_it_was_captured_with(dtype):
    step = Step(dtype, [900, 64, 300, 2000])
    wanted = step.run()
    metadata = step.metadata()
    lengths = metadata.seq_lens.clone()
    metadata.seq_lens.fill_(1)
    output = torch.empty_like(wanted)
    graph = torch.cuda.CUDAGraph()
    step.run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            cuda_decode.decode(step.query, step.cache, metadata, step.spec, output)
    metadata.seq_lens.copy_(lengths)
    graph.replay()
    assert output.equal(wanted)


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block"),
    [(32, 8, 128, 32), (8, 8, 64, 8), (6, 2, 64, 16), (2, 1, 128, 64), (4, 4, 96, 32)],
)
def test_fused_rotation_equals_separate_rotation(
    dtype, heads, kv_heads, size, block, order, is_fixed
):
    lengths = [1, 2, block, block + 1, 64, 65, 150, 700, 2500, *[90] * 40]
    step = Step(
        dtype, lengths, heads=heads, kv_heads=kv_heads, size=size, block=block, order=order
    )
    metadata = step.metadata()
    product = torch.randn(len(lengths), heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
    angles = torch.outer(torch.arange(3000.0), torch.rand(size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = metadata.seq_lens.long() - 1
    blocks = metadata.block_tables.gather(1, (positions // block)[:, None]).long()[:, 0]
    before, own = product.clone(), step.cache.clone(memory_format=torch.preserve_format)
    slots = blocks * block + positions % block
    triton_rotary.rope_and_cache(before, table, positions, step.cache, slots)
    wanted = step.run(metadata, query=before[:, :heads], is_fixed=is_fixed)

    found = HopperDecodes(DEVICE, dtype).rotated(
        product, table, own, metadata, step.spec, is_fixed=is_fixed
    )

    assert found is not None
    assert found.equal(wanted)
    assert own.nan_to_num().equal(step.cache.nan_to_num())


def test_fused_rotation_follows_the_norms_of_heads(dtype):
    step = Step(dtype, [1, 40, 150], heads=8, kv_heads=2, size=128)
    metadata, decodes = step.metadata(), HopperDecodes(DEVICE, dtype)
    product = torch.randn(3, 12, 128, device=DEVICE).to(dtype)
    angles = torch.outer(torch.arange(200.0), torch.rand(64))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    norms = HeadNorms(*(torch.rand(128, device=DEVICE).to(dtype) for _ in range(2)), 1e-6)
    before = product.clone()
    norm_heads(before, norms.query, norms.key, 2, norms.eps)
    wanted = decodes.rotated(before, table, step.cache, metadata, step.spec)

    found = decodes.rotated(product, table, step.cache, metadata, step.spec, norms)

    assert found is not None
    assert found.equal(wanted)


def test_rotations_of_unsupported_shapes_are_declined(dtype):
    step = Step(dtype, [9], heads=8, kv_heads=1)
    product = torch.zeros(1, 10, 128, dtype=dtype, device=DEVICE)
    decodes = HopperDecodes(DEVICE, dtype)
    for width in (128, 64):
        table = torch.zeros(20, width, device=DEVICE)
        heads = product if width == 128 else product[:, 4:]
        assert decodes.rotated(heads, table, step.cache, step.metadata(), step.spec) is None


def test_the_refusal_of_the_decode_kernel_names_the_unsupported_feature(dtype):
    step = Step(dtype, [9], heads=9, kv_heads=1)
    assert "9 query heads" in (cuda_decode.refusal(step.query, step.cache, step.spec) or "")
    windowed = AttentionSpec(scale=1.0, window=5)
    step = Step(dtype, [9])
    assert "window" in (cuda_decode.refusal(step.query, step.cache, windowed) or "")
    biased = AttentionSpec(scale=1.0, position_bias=torch.zeros(32, 64, device=DEVICE))
    assert "bias" in (cuda_decode.refusal(step.query, step.cache, biased) or "")
    assert "float32" in (cuda_decode.refusal(step.query.float(), step.cache, step.spec) or "")
    step = Step(dtype, [9], size=96)
    scales = torch.ones(4, 2, device=DEVICE)
    quantized = AttentionSpec(scale=1.0, kv_scales=scales)
    stored = step.cache.to(torch.float8_e4m3fn)
    assert "heads of 96" in (cuda_decode.refusal(step.query, stored, quantized) or "")
