"""Adapters in Triton's interpreter: the sums of the plain twin, for any mixture."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.kernels import adapters
from trimaran.kernels.adapters import AdapterBlocks, AdapterTables
from trimaran.kernels.triton import lora as triton_lora
from trimaran.worker.lora.token_slots import token_blocks

RANKS = ((4, 8, 0), (16, 0, 3), (0, 40, 20))
"""By slot and target; 0 where an adapter leaves a target alone."""


def make_tables(width: int, rows: tuple[int, ...], generator: torch.Generator) -> AdapterTables:
    """Three adapters of different sizes; target 1 belongs to another layer."""
    offsets = torch.zeros(3, 4, 3, dtype=torch.int64)
    chunks, size = [], 0
    for slot, ranks in enumerate(RANKS):
        for part, rank in enumerate(ranks[: len(rows)]):
            data = torch.randn(rank * (width + rows[part]), generator=generator)
            offsets[slot, 1 + part] = torch.tensor([rank, size, size + rank * width])
            chunks.append(data)
            size += len(data)
    return AdapterTables(torch.cat(chunks).half() / 8, offsets)


@pytest.mark.matrix(keep=6)
@pytest.mark.parametrize(
    ("width", "rows"), [(96, (64,)), (160, (72, 200)), (1100, (48, 16, 32))]
)
@pytest.mark.parametrize("block_size", [16, 64])
def test_sums_are_those_of_the_plain_twin(width, rows, block_size):
    generator = torch.Generator().manual_seed(width)
    tables = make_tables(width, rows, generator)
    slots = np.array([-1, 2, 0, 1, 0, 0, -1, 2] * 5, dtype=np.int32)
    tokens, block_slots = token_blocks(slots, block_size)
    blocks = AdapterBlocks(torch.from_numpy(tokens), torch.from_numpy(block_slots), 40)
    x = torch.randn(len(slots), width + 8, generator=generator).half()[:, :width] / 8
    wider = torch.randn(len(slots), 8 + sum(rows), generator=generator).half()
    output = wider[:, : sum(rows)]
    before, expected = wider.clone(), output.clone()
    adapters.add_adapters(x, expected, tables, blocks, 1, rows)

    triton_lora.add_adapters(x, output, tables, blocks, 1, rows)

    assert (expected != before[:, : sum(rows)]).any()
    torch.testing.assert_close(output, expected, atol=4e-3, rtol=4e-3)
    assert torch.equal(wider[slots < 0], before[slots < 0])
    assert torch.equal(wider[:, sum(rows) :], before[:, sum(rows) :])


def test_blocks_hold_every_token_with_an_adapter_once():
    slots = np.array([3, -1, 0, 3, 3, 0, 3, -1, 3, 3], dtype=np.int32)

    tokens, block_slots = token_blocks(slots, 4)

    assert block_slots.tolist() == [0, 3, 3]
    assert tokens.tolist() == [[2, 5, -1, -1], [0, 3, 4, 6], [8, 9, -1, -1]]
