"""The CUDA C++ attention of decodes over FP8 and INT8 caches, against its torch twin."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.test_cuda_decode import DEVICE, LENGTHS, TOLERANCE, Step
from trimaran.kernels import reference
from trimaran.kernels.attention import AttentionSpec
from trimaran.kernels.byte_reference import quantize_rows
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.decode_attention import HopperDecodes
from trimaran.kernels.kv_quantization import KV_DTYPES, LARGEST, as_bytes, head_scales
from trimaran.kernels.quantized import ByteInputs
from trimaran.kernels.triton import rotary as triton_rotary

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KV_DTYPES)
def kind(request):
    return request.param


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request):
    return request.param


class ByteStep(Step):
    """Decodes over a cache of one byte a number, NaN (INT8: the largest number) where it holds
    no token; each head has scales of its own."""

    def __init__(self, kind, dtype, lengths, **shape):
        super().__init__(dtype, lengths, **shape)
        stored, num_kv = KV_DTYPES[kind], self.cache.shape[3]
        draw = torch.Generator().manual_seed(1)
        scales = (torch.randn(2, num_kv, generator=draw) / 2).exp() * 4 / LARGEST[stored]
        self.scales = head_scales(*scales).to(DEVICE)
        inverse = self.scales[2:].view(2, 1, num_kv, 1)
        scaled = (self.cache.float() * inverse).clamp(-LARGEST[stored], LARGEST[stored])
        if kind == "int8":
            scaled = scaled.nan_to_num(LARGEST[stored]).round()
        self.cache = scaled.to(stored)
        self.spec = AttentionSpec(scale=self.spec.scale, kv_scales=self.scales)

    def check(self, found):
        clean = self.cache.float().nan_to_num() * self.scales[:2].view(2, 1, -1, 1)
        metadata = self.metadata()
        metadata.block_tables = metadata.block_tables.clamp(max=clean.shape[0] - 1)
        plain = AttentionSpec(scale=self.spec.scale)
        wanted = reference.paged_attention(self.query.float(), clean, metadata, plain)
        limit = TOLERANCE[found.dtype]
        assert (found.float() - wanted).norm() <= limit * wanted.norm()


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_any_lengths_agree_with_the_torch_twin(kind, dtype, lengths, is_fixed):
    step = ByteStep(kind, dtype, lengths)
    step.check(step.run(is_fixed=is_fixed))


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize("block", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(32, 8, 128), (8, 8, 64), (6, 2, 64), (7, 1, 128)]
)
def test_shapes_and_strides_agree_with_the_torch_twin(
    kind, dtype, heads, kv_heads, size, block, order
):
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    step = ByteStep(kind, dtype, [1, 70, 2000, 255, 256, 257], **shape, order=order)
    step.check(step.run())


@pytest.mark.parametrize("seed", range(8))
def test_random_batches_agree_with_the_torch_twin(kind, dtype, seed):
    draw = random.Random(seed)
    most = draw.choice([40, 300, 3000])
    lengths = [draw.randint(1, most) for _ in range(draw.choice([1, 5, 50, 300]))]
    kv_heads = draw.randint(1, 6)
    heads = draw.randint(1, 8) * kv_heads
    shape = {"heads": heads, "kv_heads": kv_heads, "size": draw.choice([64, 128])}
    step = ByteStep(kind, dtype, lengths, **shape, block=draw.choice([8, 16, 32, 64]))
    step.check(step.run())


@pytest.mark.parametrize("factor", [2.0**-40, 1e6, 2.0**60])
def test_queries_beyond_the_range_of_float16_are_exact(kind, factor):
    step = ByteStep(kind, torch.bfloat16, [70, 300])
    step.query = step.query * factor
    scales = step.scales.clone()
    step.spec = AttentionSpec(scale=step.spec.scale / factor, kv_scales=scales)
    step.check(step.run())


def test_a_deterministic_result_does_not_depend_on_other_sequences(kind):
    step = ByteStep(kind, torch.bfloat16, [700, 3, 9000, 1024, 1025, 250])
    together = step.run(is_fixed=True)
    for number in range(len(step.lengths)):
        one = slice(number, number + 1)
        alone = step.run(
            step.metadata(number, number + 1), query=step.query[one], is_fixed=True
        )
        assert alone.equal(together[one]), step.lengths[number]


@pytest.mark.parametrize("order", ["head", "token"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block"),
    [(32, 8, 128, 32), (8, 8, 64, 8), (6, 2, 64, 16), (2, 1, 128, 64)],
)
def test_fused_rotation_equals_separate_rotation(
    kind, dtype, heads, kv_heads, size, block, order
):
    lengths = [1, 2, block, block + 1, 64, 65, 150, 700, 2500, *[90] * 40]
    shape = {"heads": heads, "kv_heads": kv_heads, "size": size, "block": block}
    step = ByteStep(kind, dtype, lengths, **shape, order=order)
    metadata = step.metadata()
    product = torch.randn(len(lengths), heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
    product[3] *= 1000  # beyond the range of the cache
    angles = torch.outer(torch.arange(3000.0), torch.rand(size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = metadata.seq_lens.long() - 1
    blocks = metadata.block_tables.gather(1, (positions // block)[:, None]).long()[:, 0]
    before, own = product.clone(), step.cache.clone(memory_format=torch.preserve_format)
    slots = blocks * block + positions % block
    scales = step.scales
    triton_rotary.rope_and_cache(before, table, positions, step.cache, slots, True, scales)
    wanted = step.run(metadata, query=before[:, :heads])

    found = HopperDecodes(DEVICE, dtype).rotated(product, table, own, metadata, step.spec)

    assert found is not None
    assert found.equal(wanted)
    assert as_bytes(own).equal(as_bytes(step.cache))

    # The same keys are stored again.
    for inputs in (ByteInputs(), ByteInputs(scale=torch.tensor(0.01, device=DEVICE))):
        rows = HopperDecodes(DEVICE, dtype).quantized(
            product, table, own, metadata, step.spec, inputs
        )
        assert (rows is None) == (size != 128)
        if rows is not None:
            expected = quantize_rows(wanted.flatten(1), inputs)
            assert rows.scales[:, : len(lengths)].equal(expected.scales[:, : len(lengths)])
            assert as_bytes(rows.values).equal(as_bytes(expected.values))


def test_a_quantized_cache_without_scales_is_refused(kind, dtype):
    step = ByteStep(kind, dtype, [9])
    plain = AttentionSpec(scale=1.0)
    assert "a cache of" in (cuda_decode.refusal(step.query, step.cache, plain) or "")
