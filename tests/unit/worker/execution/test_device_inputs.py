"""A step's inputs from the kernels for GPUs equal those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, TokenWrite, int32s

NUM_ROWS, MAX_LEN, BLOCK = 7, 600, 16
CPU = torch.device("cpu")


@pytest.fixture
def both():
    device = DeviceInputs(NUM_ROWS, MAX_LEN, 700, BLOCK, CPU, depth=2)
    device.use_spare_block(99)
    return InputBatch(NUM_ROWS, MAX_LEN, BLOCK, 1, CPU, 2), device


def decide(entries, sampled, new_rows=(), new_blocks=(), num_decodes=0):
    """A decision of (row, computed, chunk) entries."""
    rows, computed, chunks = zip(*entries, strict=True)
    return SchedulerOutput(
        step=1,
        rows=int32s(rows),
        num_scheduled_tokens=int32s(chunks),
        num_computed_tokens=int32s(computed),
        sampled=int32s(sampled),
        new_blocks=int32s(new_blocks, 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=list(new_rows),
        num_decodes=num_decodes,
    )


def admit(row, length, first_block):
    """A new row with ids and blocks of its own."""
    ids = int32s(np.arange(length) + 1000 * row)
    blocks = [(0, row, n, first_block + 3 * n) for n in range(-(-length // BLOCK))]
    return NewRow(row=row, token_ids=ids, num_prompt_tokens=length), blocks


def compare(cpu, device, decision, num_padded=0):
    exact = cpu.resolved(decision)
    expected = cpu.prepare(exact)
    found = device.prepare(device.resolved(decision), num_padded)
    tokens, entries = len(expected.positions), len(decision.rows)
    assert torch.equal(found.token_ids[:tokens], expected.token_ids)
    assert torch.equal(found.positions[:tokens], expected.positions)
    assert torch.equal(found.slot_mappings[0][:tokens], expected.slot_mappings[0])
    assert torch.equal(found.seq_lens[:entries], expected.seq_lens)
    assert torch.equal(found.query_start_loc[: entries + 1], expected.query_start_loc)
    assert found.rows[:entries].tolist() == decision.rows.tolist()
    assert torch.equal(found.sampled_slots, cpu_places(expected, device))
    assert found.sampled_rows.tolist() == decision.rows[decision.sampled].tolist()
    ends = exact.num_computed_tokens + exact.num_scheduled_tokens
    assert found.sampled_lengths.tolist() == ends[decision.sampled].tolist()
    if expected.logits_indices is not None:
        assert torch.equal(found.logits_indices, expected.logits_indices)
    most = decision.num_computed_tokens + decision.num_scheduled_tokens
    assert found.max_query_len == expected.max_query_len
    assert found.max_seq_len == most.max() >= expected.max_seq_len
    return expected, found


def cpu_places(expected, device):
    # Both tables have rows of max_seq_len + 1 ids.
    assert device.token_table.shape[1] == MAX_LEN + 1
    return expected.sampled_slots


def test_inputs_hold_chunks_and_decodes_of_new_rows(both):
    (first, blocks), (second, more) = admit(3, 530, 5), admit(0, 40, 300)
    decision = decide(
        [(3, 0, 530), (0, 0, 30)], [0], new_rows=[first, second], new_blocks=blocks + more
    )
    _, found = compare(*both, decision)
    assert not found.has_past
    third, others = admit(6, 9, 400)
    decision = decide(
        [(3, 530, 1), (0, 30, 10), (6, 0, 9)],
        [0, 1, 2],
        new_rows=[third],
        new_blocks=[(0, 3, 34, 77), *others],
        num_decodes=1,
    )
    _, found = compare(*both, decision)
    assert found.has_past


def test_padding_entries_use_the_spare_row_and_block(both):
    (first, blocks), (second, more) = admit(2, 33, 5), admit(5, 16, 50)
    compare(
        *both,
        decide([(2, 0, 33), (5, 0, 16)], [0, 1], [first, second], blocks + more),
    )
    decision = decide(
        [(2, 33, 1), (5, 16, 1)], [0, 1], new_blocks=[(0, 5, 1, 60)], num_decodes=2
    )
    _, found = compare(*both, decision, num_padded=4)

    assert found.rows.tolist() == [2, 5, NUM_ROWS, NUM_ROWS]
    assert found.seq_lens.tolist() == [34, 17, 1, 1]
    assert found.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert found.positions.tolist() == [33, 16, 0, 0]
    assert found.slot_mappings[0].tolist()[2:] == [99 * BLOCK] * 2


def test_padding_entries_are_sampled_by_no_row_and_stored_where_no_step_reads(both):
    (first, blocks), (second, more) = admit(2, 33, 5), admit(5, 16, 50)
    compare(*both, decide([(2, 0, 33), (5, 0, 16)], [0, 1], [first, second], blocks + more))
    _, device = both
    device.prepare(decide([(2, 33, 1), (5, 16, 1)], [0, 1], num_decodes=2), 4)
    found = device.views(4, 4, 4)

    assert found.sampled_rows.tolist() == [2, 5, -1, -1]
    row_len = MAX_LEN + 1
    places = [2 * row_len + 34, 5 * row_len + 17, MAX_LEN, MAX_LEN]
    assert found.sampled_slots.tolist() == places


def test_steps_in_flight_have_turns_of_their_own(both):
    first, blocks = admit(2, 33, 5)
    compare(*both, decide([(2, 0, 33)], [0], [first], blocks))
    _, device = both
    turns = []
    for _ in range(device.num_ring_slots):
        device.prepare(decide([(2, 33, 1)], [0], num_decodes=1))
        turns.append(device.ring_slot)
        assert device.ring_slot_on_device.item() == device.ring_slot

    assert sorted(turns) == [0, 1, 2]


def test_a_step_with_prompts_is_padded_with_tokens_and_empty_entries(both):
    (first, blocks), (second, more) = admit(2, 33, 5), admit(5, 16, 50)
    decision = decide([(2, 0, 33), (5, 0, 16)], [0, 1], [first, second], blocks + more)
    _, found = compare(*both, decision, num_padded=64)

    assert found.query_start_loc.tolist() == [0, 33, *range(49, 65), *[64] * 47]
    assert found.seq_lens.tolist() == [33, 16, *[1] * 15, *[0] * 47]
    assert found.rows.tolist()[2:] == [NUM_ROWS] * 62
    assert found.slot_mappings[0].tolist()[49:] == [99 * BLOCK] * 15
    assert found.positions.tolist()[49:] == [0] * 15


def test_sampled_ids_are_the_next_steps_input(both):
    new, blocks = admit(1, 20, 5)
    _, found = compare(*both, decide([(1, 0, 20)], [0], [new], blocks))
    _, device = both
    ids = torch.tensor([4321])
    device.write_sampled(found, ids)
    decision = decide([(1, 20, 1)], [0], num_decodes=1)

    assert device.prepare(decision).token_ids.tolist() == [4321]


def test_pinned_buffers_grow_with_the_step_and_are_used_in_turn(both):
    _, device = both
    before = device.pinned_bytes
    for row in range(NUM_ROWS):
        new, blocks = admit(row, MAX_LEN - row, 7 * row)
        inputs = device.prepare(decide([(row, 0, 64)], [], [new], blocks))
        assert inputs.token_ids.tolist() == [1000 * row + n for n in range(64)]
    assert device.pinned_bytes > before


def test_ids_chosen_on_the_host_are_the_next_inputs_of_their_rows(both):
    (first, blocks), (second, more) = admit(3, 40, 5), admit(0, 40, 300)
    compare(*both, decide([(3, 0, 40), (0, 0, 40)], [0, 1], [first, second], blocks + more))
    writes = [
        TokenWrite(row=0, start=20, token_ids=int32s(range(7, 28))),
        TokenWrite(row=3, start=40, token_ids=int32s([77])),
    ]
    decision = decide([(3, 40, 1), (0, 40, 1)], [0, 1], num_decodes=2)
    decision.token_writes = writes

    _, found = compare(*both, decision)

    assert found.token_ids.tolist() == [77, 27]
    assert both[1].token_table[0, :41].tolist() == [*range(20), *range(7, 28)]


def test_token_writes_survive_encoding_for_other_ranks():
    decision = decide([(3, 40, 1)], [0], num_decodes=1)
    decision.token_writes = [TokenWrite(row=3, start=40, token_ids=int32s([5, 6]))]

    (write,) = SchedulerOutput.decode(decision.encode()).token_writes

    assert (write.row, write.start, write.token_ids.tolist()) == (3, 40, [5, 6])


def test_decodes_read_the_ids_that_a_decision_carries(both):
    (first, blocks), (second, more) = admit(2, 33, 5), admit(5, 16, 50)
    compare(
        *both,
        decide([(2, 0, 33), (5, 0, 16)], [0, 1], [first, second], blocks + more),
    )
    third, others = admit(1, 20, 80)
    decision = decide(
        [(2, 33, 1), (5, 16, 1), (1, 0, 20)],
        [0, 1, 2],
        new_rows=[third],
        new_blocks=[(0, 5, 1, 60), *others],
        num_decodes=2,
    )
    decision.decode_ids = int32s([717, 818])

    expected, _ = compare(*both, decision)

    assert expected.token_ids[:2].tolist() == [717, 818]
    again = decide([(2, 34, 1), (5, 17, 1)], [0, 1], num_decodes=2)
    again.decode_ids = int32s([1, 2])
    then = decide([(2, 35, 1), (5, 18, 1)], [0, 1], num_decodes=2)
    then.decode_ids = int32s([3, 4])
    compare(*both, again)
    expected, _ = compare(*both, then)
    assert expected.token_ids.tolist() == [3, 4]


def test_ids_of_drafts_follow_those_that_a_rank_has_sampled(both):
    (first, blocks), (second, more) = admit(2, 33, 5), admit(5, 16, 50)
    entered = blocks + more
    compare(*both, decide([(2, 0, 33), (5, 0, 16)], [0, 1], [first, second], entered))
    before = compare(*both, decide([(2, 33, 1), (5, 16, 1)], [0, 1], num_decodes=2))[1]
    own = before.token_ids[:2].tolist()
    entries = [(2, 33, 1), (5, 16, 1), (2, 34, 1), (2, 35, 1), (5, 17, 1)]
    for ids in ([7, 8, 9], [70, 80, 90]):
        decision = decide(entries, list(range(5)), num_decodes=5)
        decision.decode_ids, decision.num_drafts = int32s(ids), 3
        decision = SchedulerOutput.decode(decision.encode())

        expected, found = compare(*both, decision)

        assert expected.token_ids.tolist() == found.token_ids[:5].tolist() == [*own, *ids]
    # Rows of drafts are never advanced in place, whatever the lengths are.
    entries = [(row, start + 1, 1) for row, start, _ in entries]
    decision = decide(entries, list(range(5)), num_decodes=5)
    decision.decode_ids, decision.num_drafts = int32s([1, 2, 3]), 3
    expected, _ = compare(*both, decision)
    assert expected.token_ids[2:].tolist() == [1, 2, 3]


def test_decodes_behind_drafts_begin_where_the_accepted_drafts_end(both):
    (first, blocks), (second, more) = admit(2, 60, 5), admit(5, 16, 50)
    compare(*both, decide([(2, 0, 60), (5, 0, 16)], [0, 1], [first, second], blocks + more))
    # Three drafts of row 2 were in flight, of which the device has rejected two.
    for inputs in both:
        inputs.rejected[2] = 2
    decision = decide([(2, 50, 1), (5, 15, 1), (2, 51, 1)], [0, 1, 2], num_decodes=3)
    decision.behind_drafts, decision.num_drafts = int32s([0, 2]), 1
    decision = SchedulerOutput.decode(decision.encode())

    expected, found = compare(*both, decision, num_padded=8)

    assert found.positions[:3].tolist() == [48, 15, 49]
    assert expected.token_ids.tolist() == [2048, 5015, 2049]
