"""The sides of memory, and attention of decodes whose blocks read near them."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_cuda_decode import LENGTHS, Step
from trimaran.kernels import cuda_decode, memory_sides, triton_attention_shares, triton_rotary
from trimaran.kernels.decode_attention import HopperDecodes

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SHAPES = [
    {"heads": 32, "kv_heads": 8, "size": 128, "block": 32},
    {"heads": 6, "kv_heads": 2, "size": 128, "block": 32},
    {"heads": 16, "kv_heads": 2, "size": 128, "block": 32},
    {"heads": 8, "kv_heads": 8, "size": 64, "block": 64},
]


@pytest.fixture(autouse=True)
def all_plans_are_by_sides(monkeypatch):
    monkeypatch.setattr(triton_attention_shares, "SIDED_KEYS", 0)
    monkeypatch.setattr(triton_attention_shares, "MIN_SIDED_KEYS", 0)


def moved_to_measured_memory(step):
    """The step's cache in an allocation whose sides are known."""
    blocks, _, size, heads, width = step.cache.shape
    count = max(blocks, (80 << 20) // (8 * size * heads * width))
    memory = torch.empty((count, 2, 2, heads, size, width), device=DEVICE).to(step.query.dtype)
    memory[:blocks, 1] = step.cache.transpose(2, 3)
    assert memory_sides.measure(memory) is not None
    step.cache = memory.transpose(3, 4)[:, 1]
    return step


def plan_of(metadata):
    (plan,) = metadata.plans.values()
    return plan


def test_every_processor_and_every_address_has_a_side():
    memory = torch.randint(1 << 20, (200 << 20,), dtype=torch.int32, device=DEVICE)
    before = memory.clone()
    sides = memory_sides.measure(memory)
    assert sides is not None
    assert memory.equal(before)
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    of_one = sum(word.bit_count() for word in sides.processor_sides)
    assert count / 3 < of_one < count * 2 / 3
    assert sides.changes_by(4096)
    again = memory_sides.measure(memory)
    assert again.mask == sides.mask
    assert again.page_bits.equal(sides.page_bits)
    assert again.processor_sides == sides.processor_sides
    assert memory_sides.sides_of(memory[5:]) is again
    memory_sides.forget(memory)
    assert memory_sides.sides_of(memory) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_any_lengths_agree_with_the_twin(dtype, lengths, shape):
    step = moved_to_measured_memory(Step(dtype, lengths, **shape))
    metadata = step.metadata()
    found = step.run(metadata)
    plan = plan_of(metadata)
    assert int(plan.shares[2]) == 1
    assert int(plan.counters.abs().max()) == 0
    of_either = plan.num_programs * shape["kv_heads"] // 2
    assert min(plan.readers[0].tolist()) >= of_either
    assert plan.readers[1].tolist() == [0, 0]
    step.check(found)


def test_a_result_is_the_same_every_time_and_for_every_layer_of_a_step():
    step = moved_to_measured_memory(Step(torch.bfloat16, [700, 3, 9000, 250] * 9, **SHAPES[0]))
    metadata = step.metadata()
    first = step.run(metadata)
    for _ in range(triton_attention_shares.MAX_LAYERS + 5):
        assert step.run(metadata).equal(first)
    assert step.run().equal(first)


@pytest.mark.parametrize(("sided_keys", "is_sided"), [(100, 0), (99, 1)])
def test_short_sequences_are_read_on_both_sides(monkeypatch, sided_keys, is_sided):
    monkeypatch.setattr(triton_attention_shares, "SIDED_KEYS", sided_keys)
    step = moved_to_measured_memory(Step(torch.bfloat16, [99] * 70, **SHAPES[0]))
    metadata = step.metadata()
    step.check(step.run(metadata))
    assert int(plan_of(metadata).shares[2]) == is_sided


@pytest.mark.parametrize("shape", [{"block": 64}, {"block": 16}, {"kv_heads": 3, "heads": 6}])
def test_caches_that_do_not_lie_evenly_are_read_on_both_sides(shape):
    step = moved_to_measured_memory(Step(torch.float16, [300] * 40, **shape))
    metadata = step.metadata()
    step.check(step.run(metadata))
    assert plan_of(metadata).readers is None


def test_a_fixed_result_does_not_depend_on_sides():
    step = Step(torch.float16, [700, 3, 9000, 1024], **SHAPES[0])
    wanted = step.run(is_fixed=True)
    assert moved_to_measured_memory(step).run(is_fixed=True).equal(wanted)


def test_a_graph_serves_other_lengths_than_it_was_captured_with():
    step = moved_to_measured_memory(Step(torch.bfloat16, [900, 64, 300, 2000], **SHAPES[0]))
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
    for _ in range(5):
        output.zero_()
        graph.replay()
        assert output.equal(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=str)
def test_the_newest_token_is_rotated_and_stored_by_the_side_that_it_lies_on(dtype, shape):
    block, heads, kv_heads, size = (
        shape[key] for key in ("block", "heads", "kv_heads", "size")
    )
    lengths = [1, 2, 16, 17, block, block + 1, 64, 65, 150, 700, 2500, *range(60, 130)]
    step = moved_to_measured_memory(Step(dtype, lengths, **shape))
    metadata = step.metadata()
    product = torch.randn(len(lengths), heads + 2 * kv_heads, size, device=DEVICE).to(dtype)
    angles = torch.outer(torch.arange(3000.0), torch.rand(size // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(DEVICE)
    positions = metadata.seq_lens.long() - 1
    blocks = metadata.block_tables.gather(1, (positions // block)[:, None]).long()[:, 0]
    before, wanted = product.clone(), step.cache.clone(memory_format=torch.preserve_format)
    slots = blocks * block + positions % block
    triton_rotary.rope_and_cache(before, table, positions, wanted, slots)

    found = HopperDecodes(DEVICE, dtype).rotated(
        product, table, step.cache, metadata, step.spec
    )

    assert found is not None
    assert int(plan_of(metadata).shares[2]) == 1
    assert step.cache.nan_to_num().equal(wanted.nan_to_num())
    step.query = before[:, :heads]
    step.check(found)
