"""Decode steps whose inputs two objects make, one of them by the kernel for decodes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch

from trimaran.kernels.cuda.decode_inputs import MAX_BLOCKS
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s

MAX_LEN, BLOCK, SWITCH = 200, 16, 40


def make_inputs(num_rows: int, switch_at: int, device: torch.device) -> DeviceInputs:
    inputs = DeviceInputs(num_rows, MAX_LEN, 100 * num_rows, BLOCK, device, 2, switch_at)
    inputs.use_spare_block(7)
    return inputs


def _decide(rows, computed, chunks, new_rows=(), new_blocks=()) -> SchedulerOutput:
    return SchedulerOutput(
        step=1,
        rows=int32s(rows),
        num_scheduled_tokens=int32s(chunks),
        num_computed_tokens=int32s(computed),
        sampled=int32s(range(len(rows))),
        new_blocks=int32s(new_blocks, 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=list(new_rows),
        num_decodes=0 if new_rows else len(rows),
    )


def check_decodes(
    ours: DeviceInputs, others: DeviceInputs, sizes: Iterable[tuple[int, int]]
) -> None:
    """Prepare steps of so many entries, padded to so many, by both, and compare all inputs."""
    rng = random.Random(5)
    num_rows = len(ours.num_prompt_tokens)
    lengths = [rng.randrange(1, 90) for _ in range(num_rows)]
    new_rows = [
        NewRow(
            row=row, token_ids=int32s([rng.randrange(1000) for _ in range(length)]),
            num_prompt_tokens=length,
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    blocks = [(0, row, index, 10 * row + index) for row in range(num_rows) for index in (0, 1)]
    for inputs in (ours, others):
        inputs.prepare(_decide(range(num_rows), [0] * num_rows, lengths, new_rows, blocks))
    for count, num_padded in sizes:
        rows = rng.sample(range(num_rows), count)
        computed = [lengths[row] - 1 for row in rows]
        added = [(0, row, lengths[row] // BLOCK, 5000 + row) for row in rows[:MAX_BLOCKS]]
        step = _decide(rows, computed, [1] * count, (), added)

        found, expected = (each.prepare(step, num_padded) for each in (ours, others))

        size = max(count, num_padded)
        mine, theirs = ours.target, others.target
        assert torch.equal(mine.wide[:4, :size], theirs.wide[:4, :size])
        assert torch.equal(mine.narrow[:6, :size], theirs.narrow[:6, :size])
        # Starts of entries, and the end of the last.
        assert torch.equal(mine.narrow[3, : size + 1], theirs.narrow[3, : size + 1])
        assert torch.equal(mine.narrow[6, :2], theirs.narrow[6, :2])
        assert torch.equal(ours.block_tables, others.block_tables)
        assert found.max_seq_len == expected.max_seq_len
        assert found.logits_indices is None and expected.logits_indices is None
