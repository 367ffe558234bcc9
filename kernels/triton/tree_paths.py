"""Accepted paths through trees of drafts on a GPU: found, and moved to consecutive slots."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.triton.inputs import StepTensors

# Shapes: n sequences with draft rows, N sampled rows, R rows, B tokens of a block, K key-value
# heads, H head size.

MAX_NODES = 64
_NODES = tl.constexpr(MAX_NODES)
_TILE = 1024


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _parents(words, nodes):  # type: ignore[no-untyped-def]
    """The parent of each node, -1 for the root: the next row that the node's row sees."""
    above = words >> 1
    lowest = above & -above
    # A power of two is exact as a float, whose exponent is the number of its bit.
    exponent = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.where(lowest == 0, -1, tl.maximum(nodes - exponent - 1, -1))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _accept_kernel(  # type: ignore[no-untyped-def]
    runs, ids, wide, narrow, table, rejected, num_accepted, last, paths, wide_stride,
    narrow_stride, row_len,
):  # fmt: skip
    """Program s follows the path of run s; see `accept_paths`."""
    run = tl.program_id(0)
    own, first = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
    count = tl.load(runs + 3 * run + 2)
    nodes = tl.arange(0, _NODES)
    is_node = nodes < count
    # Entries and tokens of decodes have the same numbers, and those of a run are adjacent.
    token = tl.load(wide + 2 * wide_stride + first)
    drafts = tl.load(narrow + token + nodes, mask=is_node, other=-1)
    words = tl.load(wide + 4 * wide_stride + token + nodes, mask=is_node, other=-1)
    parents = _parents(words, nodes)
    row = tl.load(narrow + narrow_stride + token)
    place = table + row.to(tl.int64) * row_len
    place += tl.load(narrow + 2 * narrow_stride + token) - 1
    at = own * 0 - 1
    length = own * 0
    chosen = tl.load(ids + own)
    tl.store(place, chosen.to(tl.int32))
    is_right = is_node & (parents == at) & (drafts == chosen)
    found = tl.min(tl.where(is_right, nodes, _NODES), 0)
    while found < _NODES:
        tl.store(paths + run * _NODES + length, found)
        at = found
        length += 1
        chosen = tl.load(ids + first + at)
        tl.store(place + length, chosen.to(tl.int32))
        is_right = is_node & (parents == at) & (drafts == chosen)
        found = tl.min(tl.where(is_right, nodes, _NODES), 0)
    tl.store(rejected + row, count - length)
    tl.store(num_accepted + own, length)
    tl.store(last + own, tl.where(at < 0, own, first + at))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _move_kernel(  # type: ignore[no-untyped-def]
    runs, paths, num_accepted, wide, pool, wide_stride, block_stride, layer_stride, kind_stride,
    token_stride, head_stride, KINDS: tl.constexpr, HEADS: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (s, l, t) moves the t-th tile of the entries of run s in layer l."""
    run, layer = tl.program_id(0), tl.program_id(1)
    own, first = tl.load(runs + 3 * run), tl.load(runs + 3 * run + 1)
    token = tl.load(wide + 2 * wide_stride + first)
    number = tl.program_id(2) * TILE + tl.arange(0, TILE)
    kind, head, dim = number // (HEADS * HEAD), number // HEAD % HEADS, number % HEAD
    offsets = kind.to(tl.int64) * kind_stride + head * head_stride + dim
    offsets += layer.to(tl.int64) * layer_stride
    is_number = number < KINDS * HEADS * HEAD
    slots = wide + wide_stride + token
    # In order: a target is the slot of an earlier node than all later sources.
    for place in range(tl.load(num_accepted + own)):
        node = tl.load(paths + run * _NODES + place)
        if node != place:
            source, target = tl.load(slots + node), tl.load(slots + place)
            from_slot = source // BLOCK * block_stride + source % BLOCK * token_stride
            to_slot = target // BLOCK * block_stride + target % BLOCK * token_stride
            values = tl.load(pool + from_slot + offsets, mask=is_number)
            tl.store(pool + to_slot + offsets, values, mask=is_number)


def accept_paths(
    runs: Tensor,
    ids_N: Tensor,
    step: StepTensors,
    token_table_RL: Tensor,
    outcomes: tuple[Tensor, Tensor],
    paths: Tensor,
) -> None:
    """Follow the accepted path of each run of draft rows, from the sampled ids of ``step``.

    ``runs`` is int32 [n, 3]: the indices among the sampled rows of a sequence's own row and of
    its first draft row, and the number of draft rows, `MAX_NODES` at most. Fills ``outcomes``
    at each own row: int64 [N], the number of accepted drafts, and the last accepted row among
    the sampled rows. Fills ``paths``, int32 [n, MAX_NODES], with the accepted nodes. Writes the
    model's own ids of the path behind the sequence in the token table, and ``step.rejected``.
    """
    _accept_kernel[(len(runs),)](
        runs, ids_N, step.wide, step.narrow, token_table_RL, step.rejected, *outcomes, paths,
        step.wide.stride(0), step.narrow.stride(0), token_table_RL.stride(0), num_warps=1,
    )  # fmt: skip


def move_paths(
    runs: Tensor, paths: Tensor, num_accepted_N: Tensor, step: StepTensors, pool: Tensor
) -> None:
    """Move the cache entries of accepted paths to consecutive slots, in the first KV group's
    slots of ``step``. After `accept_paths`.

    ``pool`` [blocks, layers, kinds, B, K, H] may have any strides but 1 in its last dim.
    """
    _, layers, kinds, block, heads, size = pool.shape
    grid = len(runs), layers, triton.cdiv(kinds * heads * size, _TILE)
    _move_kernel[grid](
        runs, paths, num_accepted_N, step.wide, pool, step.wide.stride(0), *pool.stride()[:5],
        KINDS=kinds, HEADS=heads, HEAD=size, BLOCK=block, TILE=_TILE, num_warps=4,
    )  # fmt: skip
