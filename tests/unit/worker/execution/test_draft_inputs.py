"""The places of drafts from the kernel for GPUs equal those of the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.draft_inputs import DraftInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.steps.step_types import SchedulerOutput, int32s

NUM_ROWS, MAX_LEN, BLOCK = 9, 90, 8
MAX_ROWS, WIDTH, SPARE = 40, 6, 50
CPU = torch.device("cpu")


def decide(rng, most):
    """A step of decodes, some of which verify up to ``most`` drafts, and its sampled ids: some
    drafts equal these ids."""
    rows = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)]
    lengths = rng.integers(1, MAX_LEN - most - 2, len(rows))
    drafts = [int(rng.integers(0, most + 1)) for _ in rows]
    order = [place for place, count in enumerate(drafts) if count]
    computed = [*lengths, *(lengths[p] + n + 1 for p in order for n in range(drafts[p]))]
    own = (rng.random((len(rows), most + 1)) < 0.8).astype(np.int64)
    ids = np.ones(sum(drafts), np.int64)
    firsts = np.cumsum([len(rows), *(drafts[place] for place in order)])
    told = dict(zip(order, firsts, strict=False))
    wanted = rng.permutation(len(rows))[: rng.integers(1, len(rows) + 1)]
    proposals = [
        (p, told.get(p, 0), drafts[p], lengths[p] + 1 + rng.integers(0, 3 * most), most)
        for p in wanted
    ]
    decision = SchedulerOutput(
        step=1,
        rows=int32s([*rows, *(rows[p] for p in order for _ in range(drafts[p]))]),
        num_scheduled_tokens=int32s([1] * len(computed)),
        num_computed_tokens=int32s(computed),
        sampled=int32s(range(len(computed))),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=[],
        num_decodes=len(computed),
        num_drafts=len(ids),
        decode_ids=int32s(ids),
        proposals=int32s(proposals, 5),
    )
    sampled = [*own[:, 0], *(own[p, 1 + n] for p in order for n in range(drafts[p]))]
    return decision, torch.tensor(sampled)


def make_both(most):
    """Inputs and draft inputs of the CPU and of a GPU, whose tables have the same blocks."""
    found = []
    tables = torch.from_numpy(np.random.default_rng(1).integers(0, SPARE, (NUM_ROWS, 12)))
    batch = InputBatch(NUM_ROWS, MAX_LEN, BLOCK, 1, CPU, 2)
    device = DeviceInputs(NUM_ROWS, MAX_LEN, 200, BLOCK, CPU, depth=2)
    device.use_spare_block(SPARE)
    for inputs in (batch, device):
        rows = inputs.block_tables[0] if inputs is batch else inputs.block_tables[:-1]
        rows.copy_(tables)
        spare_slot = SPARE * BLOCK
        own = DraftInputs(inputs, MAX_ROWS, most, WIDTH, torch.float32, spare_slot)
        found.append((inputs, own))
    return found


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("most", [3, 1, 4])
def test_a_gpu_finds_the_same_places_and_pads_in_the_spare_block(most):
    (batch, cpu), (device, gpu) = make_both(most)
    rng = np.random.default_rng(most)
    num_accepted = set()
    for _ in range(15):
        decision, ids = decide(rng, most)
        count = len(decision.proposals)
        cpu.send(decision, batch.prepare(decision), ids, count)
        gpu.send(decision, device.prepare(decision), ids, NUM_ROWS)
        expected, found = cpu.batch(count), gpu.batch(NUM_ROWS)
        drafts = torch.from_numpy(rng.integers(2, 99, (NUM_ROWS, most)))
        cpu.store(drafts[:count], expected)
        gpu.store(drafts, found)

        for field in dataclasses.fields(expected):
            wanted = getattr(expected, field.name)
            told = getattr(found, field.name)
            assert told.dtype == wanted.dtype
            assert torch.equal(told[..., :count], wanted), field.name
        assert torch.equal(device.rejected[:-1], batch.rejected)
        assert torch.equal(device.token_table[:-1], batch.token_table)
        assert (found.slots[:, count:] // BLOCK == SPARE).all()
        assert (found.lengths[:, count:] == 1).all()
        ends = decision.num_computed_tokens + decision.num_scheduled_tokens
        own = torch.from_numpy(ends[decision.proposals[:, 0]])
        num_accepted |= set((expected.positions[0] - own).tolist())
    assert num_accepted == set(range(most + 1))


def test_states_of_sampled_rows_are_kept_for_drafts():
    (_, cpu), _ = make_both(2)
    states = torch.randn(5, WIDTH)

    kept = cpu.keep(states)

    assert torch.equal(kept, states)
    assert cpu.keep(kept[:3]).data_ptr() == cpu.states.data_ptr()
    assert torch.equal(cpu.states[:5], states)
