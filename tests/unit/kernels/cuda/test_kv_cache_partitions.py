"""Which caches have heads that lie on one L2 partition each."""

import itertools

import pytest
import torch

from trimaran.kernels.cuda.kv_cache_partitions import (
    block_partitions,
    keys_go_first,
    stripe_tokens,
)
from trimaran.kernels.cuda.l2_partitions import PAGE_BYTES, STRIPE_BYTES, L2Partitions

H200_MASK, H100_MASK = 0xAB000, 0xB3000


def known_partitions(first_page: int, pages: bytes, mask: int = H200_MASK) -> L2Partitions:
    return L2Partitions(mask, first_page, pages, torch.empty(0), ())


@pytest.mark.parametrize(
    ("mask", "layers", "heads", "is_first"),
    [
        (H200_MASK, 32, 8, True),
        (H200_MASK, 32, 4, False),
        (H200_MASK, 32, 2, True),
        (H200_MASK, 8, 8, True),
        (H100_MASK, 32, 8, False),
        (H100_MASK, 32, 4, False),
        (H100_MASK, 32, 2, True),
        (H100_MASK, 16, 16, True),
    ],
)
def test_keys_and_values_of_a_head_lie_in_the_partition_of_their_block(
    mask, layers, heads, is_first
):
    assert keys_go_first(layers, heads, STRIPE_BYTES, mask) is is_first
    partitions = known_partitions(7, bytes([0, 1, 1, 0]), mask)
    block_bytes = 2 * layers * heads * STRIPE_BYTES
    strides = (heads, layers * heads) if is_first else (2 * heads, heads)
    found: dict[tuple[int, int], set[int]] = {}
    for begin in range(7 * PAGE_BYTES, 11 * PAGE_BYTES, block_bytes):
        for layer, kind, head in itertools.product(range(layers), (0, 1), range(heads)):
            place = begin + STRIPE_BYTES * (layer * strides[0] + kind * strides[1] + head)
            for byte in (0, STRIPE_BYTES - 1):
                partition = partitions.partition(place + byte) ^ partitions.partition(begin)
                found.setdefault((layer, head), set()).add(partition)
    for layer, head in itertools.product(range(layers), range(0, heads, 2)):
        assert len(found[layer, head]) == len(found[layer, head + 1]) == 1
        assert found[layer, head] != found[layer, head + 1]


@pytest.mark.parametrize(
    ("layers", "heads", "head_bytes"),
    [
        (32, 8, 8192),
        (32, 8, 2048),
        (28, 8, 4096),
        (64, 8, 4096),
        (16, 8, 4096),
        (32, 1, 4096),
        (32, 3, 4096),
    ],
)
def test_caches_of_other_sizes_have_no_partitions(layers, heads, head_bytes):
    assert keys_go_first(layers, heads, head_bytes, H200_MASK) is None


def test_memory_without_partitions_gives_caches_without_partitions():
    assert keys_go_first(32, 8, STRIPE_BYTES, 0) is None


@pytest.mark.parametrize(("head_bytes", "tokens"), [(256, 16), (128, 32)])
def test_a_stripe_holds_whole_tokens_of_a_head(head_bytes, tokens):
    assert stripe_tokens(head_bytes) == tokens


def test_the_partition_of_a_block_follows_from_its_address():
    room = torch.empty(3 * PAGE_BYTES, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE_BYTES
    memory = room[first : first + 2 * PAGE_BYTES].view(8, -1)
    page = memory.data_ptr() // PAGE_BYTES
    alike, other = (
        block_partitions(memory, known_partitions(page, bytes([0, bit]))) for bit in (0, 1)
    )
    assert alike[:4] == other[:4]
    assert [a ^ b for a, b in zip(alike[4:], other[4:], strict=True)] == [1] * 4
    assert len(set(alike)) == 2


def test_blocks_that_cross_pages_or_have_odd_sizes_have_no_partition():
    room = torch.empty(3 * PAGE_BYTES, dtype=torch.uint8)
    partitions = known_partitions(room.data_ptr() // PAGE_BYTES, bytes(4))
    assert block_partitions(room[: 2 * 3000].view(2, -1), partitions) is None
    shift = -room.data_ptr() % PAGE_BYTES + 4096
    assert (
        block_partitions(room[shift : shift + PAGE_BYTES // 2].view(2, -1), partitions) is None
    )
    whole = room[: 2 * (PAGE_BYTES + PAGE_BYTES // 2)].view(2, -1)
    assert block_partitions(whole, partitions) is None
