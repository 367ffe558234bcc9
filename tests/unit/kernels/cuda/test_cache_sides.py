"""Which caches have heads that lie on one side of memory each."""

import itertools

import pytest
import torch

from trimaran.kernels.cuda.cache_sides import block_sides, keys_go_first, piece_tokens
from trimaran.kernels.cuda.memory_sides import PAGE_BYTES, SIDE_BYTES, MemorySides

H200_MASK, H100_MASK = 0xAB000, 0xB3000


def known_sides(first_page: int, pages: bytes, mask: int = H200_MASK) -> MemorySides:
    return MemorySides(mask, first_page, pages, torch.empty(0), ())


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
def test_all_that_a_head_has_in_blocks_of_one_side_lies_on_one(mask, layers, heads, is_first):
    assert keys_go_first(layers, heads, SIDE_BYTES, mask) is is_first
    sides = known_sides(7, bytes([0, 1, 1, 0]), mask)
    block_bytes = 2 * layers * heads * SIDE_BYTES
    strides = (heads, layers * heads) if is_first else (2 * heads, heads)
    found: dict[tuple[int, int], set[int]] = {}
    for begin in range(7 * PAGE_BYTES, 11 * PAGE_BYTES, block_bytes):
        for layer, kind, head in itertools.product(range(layers), (0, 1), range(heads)):
            place = begin + SIDE_BYTES * (layer * strides[0] + kind * strides[1] + head)
            for byte in (0, SIDE_BYTES - 1):
                side = sides.side(place + byte) ^ sides.side(begin)
                found.setdefault((layer, head), set()).add(side)
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
def test_other_caches_have_no_sides(layers, heads, head_bytes):
    assert keys_go_first(layers, heads, head_bytes, H200_MASK) is None


def test_memory_without_sides_has_caches_without():
    assert keys_go_first(32, 8, SIDE_BYTES, 0) is None


@pytest.mark.parametrize(("head_bytes", "tokens"), [(256, 16), (128, 32)])
def test_a_piece_holds_a_heads_tokens(head_bytes, tokens):
    assert piece_tokens(head_bytes) == tokens


def test_blocks_begin_where_their_addresses_say():
    room = torch.empty(3 * PAGE_BYTES, dtype=torch.uint8)
    first = -room.data_ptr() % PAGE_BYTES
    memory = room[first : first + 2 * PAGE_BYTES].view(8, -1)
    page = memory.data_ptr() // PAGE_BYTES
    alike, other = (block_sides(memory, known_sides(page, bytes([0, bit]))) for bit in (0, 1))
    assert alike[:4] == other[:4]
    assert [a ^ b for a, b in zip(alike[4:], other[4:], strict=True)] == [1] * 4
    assert len(set(alike)) == 2


def test_blocks_across_pages_or_of_odd_sizes_have_no_side():
    room = torch.empty(3 * PAGE_BYTES, dtype=torch.uint8)
    sides = known_sides(room.data_ptr() // PAGE_BYTES, bytes(4))
    assert block_sides(room[: 2 * 3000].view(2, -1), sides) is None
    shift = -room.data_ptr() % PAGE_BYTES + 4096
    assert block_sides(room[shift : shift + PAGE_BYTES // 2].view(2, -1), sides) is None
    whole = room[: 2 * (PAGE_BYTES + PAGE_BYTES // 2)].view(2, -1)
    assert block_sides(whole, sides) is None
