"""Rows of trees, and accepted paths: the kernels for GPUs do what the CPU does, and a row's own
ids are those of its path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.worker.attention.backend import KVCacheSpec
from trimaran.worker.config.draft_tree import MC_SIM_7B_63, UNKNOWN_MASK, DraftTree, tree_of
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.draft_inputs import DraftInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.execution.tree_paths import (
    DeviceTreePaths,
    TreePaths,
    table_of_paths,
)
from trimaran.worker.kv_cache.kv_group import KVGroup
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import SchedulerOutput, int32s

NUM_ROWS, MAX_LEN, BLOCK, SPARE = 6, 200, 8, 160
MAX_ROWS = 300
CPU = torch.device("cpu")
SPEC = KVCacheSpec(num_kv_heads=2, head_size=16, dtype=torch.float32)
TREES = {
    "medusa": DraftTree(MC_SIM_7B_63),
    "wide": tree_of([[rank] for rank in range(64)]),
    "long": tree_of([[0] * 64]),
    "small": tree_of([[0, 0, 0], [1, 1], [0, 1, 2]]),
}


def decide(rng, tree, told=()):
    """A step of decodes, some of which verify the first nodes of a tree, some a chain; and its
    sampled ids, of which some equal the drafts. With inputs that are ``told`` the masks of
    some trees, the decision does not have these."""
    rows = rng.permutation(NUM_ROWS)[: rng.integers(1, 4)]
    lengths = rng.integers(1, MAX_LEN - 70, len(rows))
    entries, words, runs, proposals = [], [], [], []
    first = len(rows)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        count = int(rng.integers(0, tree.num_nodes + 1))
        if count:
            entries += [(row, length + 1 + node) for node in range(count)]
            is_chain = rng.random() < 0.2
            masks = [-1] * count if is_chain else tree.masks[:count]
            if told and rng.random() < 0.5:
                for inputs in told:
                    inputs.tree_words[row, :count] = torch.tensor(masks)
                masks = [UNKNOWN_MASK] * count
            words += masks
            runs.append((place, first, count))
        proposals.append((place, first if count else 0, count, length + 90, 3))
        first += count
    everything = [*zip(rows, lengths, strict=True), *entries]
    masks = np.array(words, dtype=np.int64).view(np.int32).reshape(-1, 2)
    decision = SchedulerOutput(
        step=1,
        rows=int32s([row for row, _ in everything]),
        num_scheduled_tokens=int32s([1] * len(everything)),
        num_computed_tokens=int32s([start for _, start in everything]),
        sampled=int32s(range(len(everything))),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        num_decodes=len(everything),
        num_drafts=len(entries),
        # Few ids, so that paths are long, and siblings are alike.
        decode_ids=int32s(rng.integers(0, 2, len(entries))),
        tree_masks=masks,
        tree_runs=int32s(runs, 3),
        proposals=int32s(proposals, 5),
    )
    return decision, torch.from_numpy(rng.integers(0, 2, len(everything)))


def make_both():
    """Inputs, paths, draft inputs and a cache of the CPU and of a GPU, with equal contents."""
    found = []
    rng = np.random.default_rng(1)
    tables = torch.from_numpy(rng.permutation(SPARE)[: NUM_ROWS * 25].reshape(NUM_ROWS, 25))
    ids = torch.from_numpy(rng.integers(5, 90, (NUM_ROWS, MAX_LEN + 1)))
    device = DeviceInputs(NUM_ROWS, MAX_LEN, MAX_ROWS * 2, BLOCK, CPU, depth=2)
    for inputs in (InputBatch(NUM_ROWS, MAX_LEN, BLOCK, 1, CPU, 2), device):
        is_device = inputs is device
        inputs.use_trees(64)
        blocks = inputs.block_tables[:-1] if is_device else inputs.block_tables[0]
        blocks.copy_(tables)
        inputs.token_table[:NUM_ROWS] = ids
        paths = (DeviceTreePaths if is_device else TreePaths)(inputs, MAX_ROWS * 2)
        drafts = DraftInputs(inputs, MAX_ROWS * 2, 64, 4, torch.float32, SPARE * BLOCK)
        drafts.outcomes = paths.outcomes
        group = KVGroup(SPEC, [0, 1, 2])
        group.allocate(SPARE, BLOCK, CPU)
        group.pool.copy_(torch.arange(group.pool.numel()).view(group.pool.shape))
        found.append((inputs, paths, drafts, group))
    device.use_spare_block(SPARE)
    return found


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("name", ["small", "medusa", "wide", "long"])
def test_a_gpu_makes_rows_of_trees_and_follows_paths_as_the_cpu_does(name):
    (batch, paths, cpu, group), (device, gpu_paths, gpu, gpu_group) = make_both()
    rng = np.random.default_rng(len(name))
    lengths = set()
    for _ in range(2):
        sent, ids = decide(rng, TREES[name], (batch, device))
        told = device.prepare(device.resolved(sent))
        decision = batch.resolved(sent)
        wanted = batch.prepare(decision)
        assert torch.equal(told.token_ids, wanted.token_ids)
        assert torch.equal(told.positions, wanted.positions)
        assert torch.equal(told.seq_lens, wanted.seq_lens)
        assert torch.equal(told.slot_mappings[0], wanted.slot_mappings[0])
        assert torch.equal(told.sampled_slots, wanted.sampled_slots)
        hidden = decision.hidden_rows
        if wanted.tree_masks is not None:
            assert torch.equal(told.tree_masks, wanted.tree_masks)
        ends = decision.num_computed_tokens + 1
        own = ends - (hidden if len(hidden) else 0)
        assert told.sampled_lengths.tolist() == own.tolist()
        assert (wanted.positions + 1).tolist() == own.tolist()
        for inputs, step in ((batch, wanted), (device, told)):
            inputs.write_sampled(step, ids)
        if len(decision.tree_runs):
            paths.accept(wanted, decision, ids)
            gpu_paths.accept(told, sent, ids)
            paths.move([group], wanted.slot_mappings)
            gpu_paths.move([gpu_group], told.slot_mappings)
        runs = decision.tree_runs[:, 0]
        for field in ("num_accepted", "last"):
            expected = getattr(paths.outcomes, field)[runs]
            assert torch.equal(getattr(gpu_paths.outcomes, field)[runs], expected)
        lengths |= set(paths.outcomes.num_accepted[runs].tolist())
        assert torch.equal(device.token_table[:-1], batch.token_table)
        assert torch.equal(device.rejected[:-1], batch.rejected)
        assert torch.equal(gpu_group.pool, group.pool)
        count = len(decision.proposals)
        cpu.send(decision, wanted, ids, count)
        gpu.send(sent, told, ids, count)
        expected, found = cpu.batch(count), gpu.batch(count)
        for field in ("sampled", "next_ids", "rows", "positions", "slots", "lengths"):
            assert torch.equal(getattr(found, field), getattr(expected, field)), field
    assert max(lengths) > 0


def test_paths_move_to_the_slots_that_they_have_without_a_tree():
    (batch, paths, _, group), _ = make_both()
    tree = TREES["small"]
    assert tree.choices == ((0,), (0, 0), (0, 0, 0), (1,), (1, 1), (0, 1), (0, 1, 2))
    masks = np.array(tree.masks, dtype=np.int64).view(np.int32).reshape(-1, 2)
    decision = SchedulerOutput(
        step=1, rows=int32s([2] * 8), num_scheduled_tokens=int32s([1] * 8),
        num_computed_tokens=int32s(range(20, 28)), sampled=int32s(range(8)),
        new_blocks=int32s((), 4), block_copies=int32s((), 3), finished_rows=int32s(()),
        num_decodes=8, num_drafts=7, decode_ids=int32s([11, 12, 13, 14, 15, 16, 17]),
        tree_masks=masks, tree_runs=int32s([(0, 1, 7)], 3),
    )  # fmt: skip
    inputs = batch.prepare(decision)
    assert inputs.positions.tolist() == [20, 21, 22, 23, 21, 22, 22, 23]
    before, slots = group.pool.clone(), inputs.slot_mappings[0]
    # Behind the root 11, behind that 16, behind that 17, behind that 50.
    ids = torch.tensor([11, 16, 0, 0, 0, 0, 17, 50])

    batch.write_sampled(inputs, ids)
    paths.accept(inputs, decision, ids)
    paths.move([group], inputs.slot_mappings)

    assert batch.token_table[2, 21:25].tolist() == [11, 16, 17, 50]
    assert batch.rejected[2] == 4

    def entry(pool, slot):
        return pool[slot // BLOCK, :, :, slot % BLOCK]

    for target, source in ((1, 1), (2, 6), (3, 7)):
        assert torch.equal(entry(group.pool, slots[target]), entry(before, slots[source]))


@pytest.mark.parametrize("name", TREES)
def test_the_ids_before_a_row_are_those_of_its_path(name):
    tree = TREES[name]
    (batch, *_), _ = make_both()
    rng = np.random.default_rng(3)
    for _ in range(4):
        decision, _ = decide(rng, tree)
        if not len(decision.tree_masks):
            continue
        inputs = batch.prepare(decision)
        # A step in a CUDA graph has padding.
        inputs.tree_masks = torch.nn.functional.pad(inputs.tree_masks, (0, 3), value=-1)
        hidden = decision.hidden_rows
        lengths = decision.num_computed_tokens + 1 - hidden
        state = SamplingRows(NUM_ROWS, 100, CPU)
        sampling = state.batch(decision.rows, lengths)
        table = table_of_paths(batch.token_table, inputs, decision, sampling)
        words = np.full(len(decision.rows), -1)
        words[len(words) - decision.num_drafts :] = decision.tree_masks.copy().view(np.int64)[
            :, 0
        ]
        rows = sampling.table_rows(np.arange(len(lengths)))
        for entry, word in enumerate(words.tolist()):
            row, slot = decision.rows[entry], int(decision.num_computed_tokens[entry])
            ids = batch.token_table[row].tolist()
            seen = [
                ids[at] for at in range(slot + 1) if slot - at > 63 or word >> slot - at & 1
            ]
            assert table[rows[entry], : lengths[entry]].tolist() == seen
            assert len(seen) == lengths[entry]


def test_decisions_with_trees_cross_the_wire():
    decision, _ = decide(np.random.default_rng(5), TREES["medusa"])

    found = SchedulerOutput.decode(decision.encode())

    assert found.tree_masks.tolist() == decision.tree_masks.tolist()
    assert found.tree_runs.tolist() == decision.tree_runs.tolist()
    assert found.hidden_rows.tolist() == decision.hidden_rows.tolist()
    assert found.hidden_rows.max() > 0
