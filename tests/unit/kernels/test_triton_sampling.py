"""The GPU's sampling kernels in Triton's interpreter: the same ids as the plain twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.kernels import triton_sampling
from trimaran.worker.candidates import argmax
from trimaran.worker.noise import gumbel, noise_keys

NUM_ROWS = 9


def make_state(seeds, indices, prompts, temperatures):
    state = np.zeros((NUM_ROWS, 4), dtype=np.int64)
    state[:, 0], state[:, 1], state[:, 2] = seeds.view(np.int64), indices, prompts
    state[:, 3] = temperatures.astype(np.float32).view(np.int32)
    return torch.from_numpy(state)


@pytest.mark.parametrize("vocab_size", [7, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_are_those_of_the_plain_twin(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    seeds = rng.integers(0, 2**64, NUM_ROWS, dtype=np.uint64)
    indices, prompts = rng.integers(0, 4, NUM_ROWS), rng.integers(1, 50, NUM_ROWS)
    temperatures = np.where(np.arange(NUM_ROWS) % 3, rng.uniform(0.2, 3, NUM_ROWS), 0.0)
    rows = torch.tensor([8, 0, 3, 1, 5], dtype=torch.int32)
    lengths = torch.from_numpy(prompts[rows] + rng.integers(0, 90, 5)).int()
    # Rows are parts of a wider table, as logits of a padded vocabulary are.
    logits = (torch.randn(5, vocab_size + 3) * 4).to(dtype)[:, :vocab_size]

    state = make_state(seeds, indices, prompts, temperatures)
    ids = triton_sampling.draw(logits, rows, lengths, state)

    keys = noise_keys(
        seeds[rows],
        indices[rows].astype(np.uint64),
        (lengths.numpy() - prompts[rows]).astype(np.uint64),
    )
    for entry, row in enumerate(rows.tolist()):
        scores = logits[entry : entry + 1].float()
        if temperatures[row]:
            noise = gumbel(
                torch.from_numpy(keys[entry : entry + 1]), torch.arange(vocab_size)[None]
            )
            scores = scores / np.float32(temperatures[row]) + noise
        assert ids[entry] == argmax(scores)[0]


def test_of_equal_logits_the_lowest_id_wins_and_masked_ones_never():
    state = make_state(
        np.zeros(NUM_ROWS, np.uint64),
        np.zeros(NUM_ROWS),
        np.zeros(NUM_ROWS),
        np.zeros(NUM_ROWS),
    )
    logits = torch.full((2, 9000), float("-inf"))
    logits[0, [5, 4500]] = 1.0
    logits[1, 8999] = -1e4
    rows, lengths = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)

    assert triton_sampling.draw(logits, rows, lengths, state).tolist() == [5, 8999]
    state[:, 3] = int(np.float32(1.0).view(np.int32))
    drawn = triton_sampling.draw(logits, rows, lengths, state).tolist()
    assert drawn[0] in (5, 4500)
    assert drawn[1] == 8999
