"""The L2 partitions, and attention of decodes that reads the near one."""

from __future__ import annotations

import math

import pytest
import torch

from tests.gpu.test_cuda_decode import LENGTHS, Step
from tests.gpu.test_cuda_decode_bytes import ByteStep
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.cuda import l2_partitions
from trimaran.kernels.cuda.kv_cache_partitions import (
    block_partitions,
    keys_go_first,
    partitions_of_heads,
)
from trimaran.kernels.decode_attention import HopperDecodes
from trimaran.kernels.kv_quantization import KV_DTYPES, as_bytes
from trimaran.kernels.triton import rotary as triton_rotary
from trimaran.kernels.triton.attention import work_items

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LAYERS = 32
SHAPES = [
    {"heads": 32, "kv_heads": 8, "size": 128, "block": 16},
    {"heads": 6, "kv_heads": 2, "size": 128, "block": 16},
    {"heads": 16, "kv_heads": 2, "size": 128, "block": 16},
    {"heads": 8, "kv_heads": 8, "size": 64, "block": 32},
]


def moved_to_measured_memory(step):
    """The step's cache in an allocation whose L2 partitions are known."""
    blocks, _, size, heads, width = step.cache.shape
    number = step.cache.element_size()
    count = max(blocks, (80 << 20) // (LAYERS * 2 * number * size * heads * width))
    shape = [count, LAYERS, 2, heads, size, width]
    mask = l2_partitions.mask_of(DEVICE)
    goes_first = keys_go_first(LAYERS, heads, number * size * width, mask)
    if goes_first:
        shape[1:3] = 2, LAYERS
    page = l2_partitions.PAGE_BYTES
    room = torch.zeros(number * math.prod(shape) + page, dtype=torch.uint8, device=DEVICE)
    first = -room.data_ptr() % page
    memory = room[first : first + number * math.prod(shape)].view(step.cache.dtype).view(shape)
    assert l2_partitions.measure(memory) is not None
    step.memory = memory
    cache = (memory[:, :, 1] if goes_first else memory[:, 1]).transpose(2, 3)
    as_bytes(cache)[:blocks] = as_bytes(step.cache)
    step.cache = cache
    return step


def plan_of(metadata):
    (plan,) = metadata.plans.values()
    return plan


def test_every_processor_and_every_address_has_a_partition():
    memory = torch.randint(1 << 20, (200 << 20,), dtype=torch.int32, device=DEVICE)
    before = memory.clone()
    partitions = l2_partitions.measure(memory)
    assert partitions is not None
    assert memory.equal(before)
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    of_one = sum(word.bit_count() for word in partitions.processor_partitions)
    assert count / 3 < of_one < count * 2 / 3
    assert partitions.partition(memory.data_ptr()) != partitions.partition(
        memory.data_ptr() + 4096
    )
    assert l2_partitions.partitions_of(memory[5:]) is partitions
    again = l2_partitions.measure(memory)
    assert (again.pages, again.processor_partitions) == (
        partitions.pages,
        partitions.processor_partitions,
    )
    l2_partitions.forget(memory)
    assert l2_partitions.partitions_of(memory) is None


def test_a_head_lies_in_the_partition_where_its_block_begins():
    step = moved_to_measured_memory(Step(torch.bfloat16, [300] * 40, **SHAPES[0]))
    partitions = partitions_of_heads(step.cache)
    assert partitions is not None
    of_blocks = block_partitions(step.memory, partitions)
    assert 0.3 < sum(of_blocks) / len(of_blocks) < 0.7
    for head in range(8):
        places = step.cache[:, :, :, head]
        stride, half = (2 * step.cache.stride(dim) for dim in (0, 1))
        found = {
            partitions.partition(places.data_ptr() + block * stride + kind * half + byte)
            ^ begin
            for block, begin in enumerate(of_blocks)
            for kind in (0, 1)
            for byte in (0, 4095)
        }
        assert len(found) == 1


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_any_lengths_agree_with_the_torch_twin(dtype, lengths, shape, is_fixed):
    step = Step(dtype, lengths, **shape)
    wanted = step.run(is_fixed=is_fixed)
    step = moved_to_measured_memory(step)
    metadata = step.metadata()
    found = step.run(metadata, is_fixed=is_fixed)
    plan = plan_of(metadata)
    assert plan.num_launches == 1
    assert int(plan.counters.abs().max()) == 0
    of_either = plan.num_programs * shape["kv_heads"] // 2
    assert min(plan.readers[0].tolist()) >= of_either
    assert plan.readers[1].tolist() == [0, 0]
    assert found.equal(wanted)


@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} sequences")
def test_caches_of_bytes_are_read_by_partitions_too(kind, lengths):
    step = ByteStep(kind, torch.bfloat16, lengths, heads=32, kv_heads=8, size=128, block=32)
    wanted = step.run()
    step = moved_to_measured_memory(step)
    metadata = step.metadata()
    assert step.run(metadata).equal(wanted)
    assert plan_of(metadata).num_launches == 1


def test_a_result_is_the_same_in_every_run_and_layer_of_a_step():
    step = moved_to_measured_memory(Step(torch.bfloat16, [700, 3, 9000, 250] * 9, **SHAPES[0]))
    metadata = step.metadata()
    first = step.run(metadata)
    for _ in range(work_items.MAX_LAYERS + 5):
        assert step.run(metadata).equal(first)
    assert step.run().equal(first)


@pytest.mark.parametrize("shape", [{"block": 64}, {"block": 32}, {"kv_heads": 3, "heads": 6}])
def test_caches_without_this_layout_are_read_by_processors_of_both_partitions(shape):
    step = Step(torch.float16, [300] * 40, **{"block": 16, **shape})
    wanted = step.run()
    step = moved_to_measured_memory(step)
    metadata = step.metadata()
    assert step.run(metadata).equal(wanted)
    assert plan_of(metadata).num_launches == 0


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


def test_sequences_without_keys_may_name_any_block():
    step = moved_to_measured_memory(Step(torch.bfloat16, [64, 300, 80], **SHAPES[0]))
    wanted = step.run()
    metadata = step.metadata()
    metadata.seq_lens[1] = 0
    for wrong in (-(1 << 30), (1 << 31) - 1):
        metadata.block_tables[1, 0] = wrong
        found = step.run(metadata)
        assert found[::2].equal(wanted[::2])
        assert not found[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]], ids=str)
def test_the_newest_token_is_rotated_and_stored(dtype, shape):
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
    assert plan_of(metadata).num_launches == 1
    assert step.cache.nan_to_num().equal(wanted.nan_to_num())
    step.query = before[:, :heads]
    step.check(found)
