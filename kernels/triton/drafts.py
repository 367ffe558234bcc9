"""Drafts of a network: where they go once the last drafts are verified, and their ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.triton.inputs import StepTensors

# Shapes: n sequences, K most drafts of a sequence, R rows, M blocks of a longest sequence, N
# sampled rows, W sequences in memory, V vocabulary of the network.

_ALIGNED = 64
"""Sequences in memory are a multiple of this: every row of a table begins at a cache line."""

_IDS_TILE = 2048


@triton.jit(do_not_specialize=["longest", "spare_slot"])  # type: ignore[untyped-decorator,unused-ignore]
def _draft_batch_kernel(  # type: ignore[no-untyped-def]
    table, ids, block_tables, wide, narrow, step_wide, step_narrow, rejected, num_accepted,
    last, longest, spare_slot, max_blocks, stride, step_wide_stride, step_narrow_stride,
    COLUMNS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_TREES: tl.constexpr,
):  # fmt: skip
    """Program s computes the entries of sequence s in the batch."""
    sequence = tl.program_id(0)
    own_row = table + sequence * COLUMNS
    row, limit, own = tl.load(own_row), tl.load(own_row + 1), tl.load(own_row + 2)
    first, num_drafts = tl.load(own_row + 3), tl.load(own_row + 4)
    length = tl.load(step_narrow + 5 * step_narrow_stride + own)
    offsets = tl.arange(0, TILE)
    is_draft = offsets < num_drafts
    if HAS_TREES:
        # `accept_paths` has found the path, and written the rejected drafts.
        accepted = tl.load(num_accepted + own, mask=num_drafts > 0, other=0)
        sampled = tl.load(last + own, mask=num_drafts > 0, other=0)
        sampled = tl.where(num_drafts > 0, sampled, own)
    else:
        # The draft rows' own tokens are the drafts.
        at_tokens = step_wide + 2 * step_wide_stride + first + offsets
        tokens = tl.load(at_tokens, mask=is_draft, other=0)
        drafts = tl.load(step_narrow + tokens, mask=is_draft, other=-1)
        at = tl.where(offsets == 0, own, first + offsets - 1)
        found = tl.load(ids + at, mask=is_draft, other=-2)
        accepted = tl.min(tl.where(is_draft & (found == drafts), TILE, offsets), 0)
        accepted = tl.minimum(accepted, num_drafts)
        tl.store(rejected + row, (num_drafts - accepted).to(tl.int32))
        sampled = tl.where(accepted == 0, own, first + accepted - 1)
    is_entry = offsets < MOST
    positions = length + accepted + offsets
    block_at = tl.minimum(positions // BLOCK, max_blocks - 1)
    blocks = tl.load(block_tables + row * max_blocks + block_at, mask=is_entry, other=0)
    slots = blocks.to(tl.int64) * BLOCK + positions % BLOCK
    slots = tl.where(positions < limit, slots, spare_slot)
    lengths = tl.minimum(positions + 1, limit)
    tl.store(wide + sequence, sampled)
    tl.store(wide + stride + sequence, tl.load(ids + sampled))
    tl.store(narrow + sequence, row.to(tl.int32))
    to = wide + 2 * stride + offsets * stride + sequence
    tl.store(to, tl.minimum(positions, longest - 1), mask=is_entry)
    tl.store(to + MOST * stride, slots, mask=is_entry)
    to = narrow + stride + offsets * stride + sequence
    tl.store(to, lengths.to(tl.int32), mask=is_entry)


@triton.jit(do_not_specialize=["row_len", "count", "stride_n", "stride_k"])  # type: ignore[untyped-decorator,unused-ignore]
def _store_kernel(  # type: ignore[no-untyped-def]
    drafts, rows, positions, table, row_len, count, stride_n, stride_k, TILE: tl.constexpr
):
    """Program s writes the drafts of sequence s behind the id at its first position."""
    sequence = tl.program_id(0)
    row = tl.load(rows + sequence).to(tl.int64)
    offsets = tl.arange(0, TILE)
    # The last entry of a row is behind its longest sequence.
    to = tl.minimum(tl.load(positions + sequence) + 1 + offsets, row_len - 1)
    is_draft = offsets < count
    own = drafts + sequence * stride_n + offsets * stride_k
    ids = tl.load(own, mask=is_draft, other=0)
    tl.store(table + row * row_len + to, ids.to(tl.int32), mask=is_draft)


@dataclass(slots=True)
class DraftBatchTensors:
    """The outputs of `draft_batch`: buffers at fixed addresses, as CUDA graphs need."""

    wide: Tensor
    """int64 [2 + 2 * K, W]: index of the last accepted row among the sampled rows, the id that
    was sampled there, positions of K drafts, their slots."""

    narrow: Tensor
    """int32 [1 + K, W]: row of the sequence, tokens up to each of the positions."""

    @classmethod
    def allocate(cls, num_rows: int, most: int, device: torch.device) -> DraftBatchTensors:
        """For ``num_rows`` sequences of ``most`` drafts."""
        width = -(-num_rows // _ALIGNED) * _ALIGNED
        wide = torch.zeros((2 + 2 * most, width), dtype=torch.int64, device=device)
        narrow = torch.zeros((1 + most, width), dtype=torch.int32, device=device)
        return cls(wide, narrow)


def draft_batch(
    table: Tensor,
    ids_N: Tensor,
    block_tables_RM: Tensor,
    step: StepTensors,
    target: DraftBatchTensors,
    longest: int,
    spare_slot: int,
    outcomes: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compare the drafts of ``step`` with its sampled ids, and fill ``target`` for its most
    drafts of each sequence, and ``step.rejected``.

    With ``outcomes`` of `tree_paths.accept_paths` these tell what became of the drafts.

    ``table`` is int64 [n, 5]: row, tokens for which the sequence has blocks, indices among the
    sampled rows of its own row and of its first draft row, and the number of draft rows, which
    is as many at most. Positions from the blocks' end on have the slot ``spare_slot``, and no
    position is beyond ``longest``.
    """
    most = (len(target.wide) - 2) // 2
    _draft_batch_kernel[(table.shape[0],)](
        table, ids_N, block_tables_RM, target.wide, target.narrow, step.wide, step.narrow,
        step.rejected, ids_N if outcomes is None else outcomes[0],
        ids_N if outcomes is None else outcomes[1], longest, spare_slot,
        block_tables_RM.shape[1], target.wide.stride(0),
        step.wide.stride(0), step.narrow.stride(0), COLUMNS=table.shape[1], MOST=most,
        TILE=triton.next_power_of_2(most), BLOCK=step.block_size,
        HAS_TREES=outcomes is not None, num_warps=1,
    )  # fmt: skip


def store_drafts(
    drafts_nK: Tensor, rows_n: Tensor, positions_n: Tensor, token_table_RL: Tensor, most: int
) -> None:
    """Write the drafts of each sequence, ``most`` at most, behind the id at its position, as
    far as its row goes.

    ``drafts`` is int64, ``rows`` int32 and ``positions`` int64.
    """
    _store_kernel[(len(drafts_nK),)](
        drafts_nK, rows_n, positions_n, token_table_RL, token_table_RL.stride(0),
        drafts_nK.shape[1], *drafts_nK.stride(), TILE=triton.next_power_of_2(most), num_warps=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log_sums_kernel(  # type: ignore[no-untyped-def]
    logits, output, row_stride, vocab_size, TILE: tl.constexpr
):
    """Program s computes the logarithm of the sum of exponentials of row s."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, TILE)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, vocab_size, TILE):
        ids = first + offsets
        own = logits + row * row_stride + ids
        values = tl.load(own, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, values)
        # The difference of two infinities is no number.
        base = tl.where(larger > float("-inf"), larger, 0.0)
        total = total * tl.exp(most - base) + tl.exp(values - base)
        most = larger
    largest = tl.max(most, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    total_of_all = tl.sum(total * tl.exp(most - base), 0)
    tl.store(output + row, base + tl.log(total_of_all))


def log_sums(logits_NV: Tensor) -> Tensor:
    """The logarithm of the sum of exponentials of each row, float32 [N]."""
    count, vocab_size = logits_NV.shape
    output = torch.empty(count, dtype=torch.float32, device=logits_NV.device)
    tile = min(triton.next_power_of_2(vocab_size), _IDS_TILE)
    _log_sums_kernel[(count,)](logits_NV, output, logits_NV.stride(0), vocab_size, TILE=tile)
    return output


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _parts_kernel(  # type: ignore[no-untyped-def]
    logits, scores, winners, row_stride, vocab_size, num_parts, TILE: tl.constexpr
):
    """Program (s, p) finds the first of the largest logits in part p of row s."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * TILE + tl.arange(0, TILE)
    own = logits + row * row_stride + ids
    values = tl.load(own, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.max(values, 0)
    # No logit equals a maximum that is not a number: the last id then counts, a valid one.
    winner = tl.min(tl.where(values == best, ids, vocab_size - 1), 0)
    tl.store(scores + row * num_parts + part, best)
    tl.store(winners + row * num_parts + part, winner)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _winners_kernel(  # type: ignore[no-untyped-def]
    scores, winners, offsets, output, vocab_size, num_parts, PARTS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Program s finds the first of the largest logits among the parts of row s."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    own = row * num_parts + parts
    values = tl.load(scores + own, mask=is_part, other=float("-inf"))
    found = tl.load(winners + own, mask=is_part, other=0)
    is_best = is_part & (values == tl.max(values, 0))
    winner = tl.min(tl.where(is_best, found, vocab_size - 1), 0).to(tl.int64)
    if HAS_OFFSETS:
        winner += tl.load(offsets + winner)
    tl.store(output + row, winner)


def likeliest_ids(logits_NV: Tensor, offsets_V: Tensor | None = None) -> Tensor:
    """The first id of the largest logit of each row, int64 [N], plus its offset.

    ``offsets`` is int64. A row that holds a logit that is not a number has some valid id.
    Torch's own kernel reads a row with one block.
    """
    count, vocab_size = logits_NV.shape
    device = logits_NV.device
    num_parts = triton.cdiv(vocab_size, _IDS_TILE)
    scores = torch.empty((count, num_parts), dtype=torch.float32, device=device)
    winners = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    output = torch.empty(count, dtype=torch.int64, device=device)
    _parts_kernel[(count, num_parts)](
        logits_NV, scores, winners, logits_NV.stride(0), vocab_size, num_parts, TILE=_IDS_TILE
    )
    _winners_kernel[(count,)](
        scores, winners, output if offsets_V is None else offsets_V, output, vocab_size,
        num_parts, PARTS=triton.next_power_of_2(num_parts), HAS_OFFSETS=offsets_V is not None,
        num_warps=1,
    )  # fmt: skip
    return output
