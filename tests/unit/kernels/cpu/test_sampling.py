"""The CPU's sampling kernels choose what their torch twins choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.build import load_library
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

CPU = torch.device("cpu")
WIDTHS = [1, 2, 15, 16, 17, 67, 68, 255, 1000, 1024, 1025, 4099, 32000]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def kernel(request):
    library = load_library()
    library.trimaran_set_num_threads(request.param)
    yield CpuSampling(library)
    library.trimaran_set_num_threads(1)


def choose(logits, params, kernel):
    """One id a row, by the kernel or by torch (None)."""
    count, vocab_size = logits.shape
    rows = SamplingRows(count, vocab_size, CPU, kernel)
    for row in range(count):
        sampling = params[row].to_wire()
        new = NewRow(row=row, token_ids=int32s([0]), num_prompt_tokens=1, sampling=sampling)
        rows.enter(new)
    batch = rows.batch(int32s(range(count)), int32s([1] * count))
    table = torch.zeros((count, 4), dtype=torch.int32)
    return HostSampler(SingleRankGroup()).sample(logits, batch, table).token_ids.tolist()


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0.05, 0.7, 1.0, 3.0])),
        top_k=int(rng.choice([0, 0, 2, 17, 50, min(vocab_size, 900), vocab_size + 5])),
        top_p=float(rng.choice([1.0, 1.0, 0.999, 0.9, 0.3, 0.01])),
        min_p=float(rng.choice([0.0, 0.0, 0.001, 0.2])),
        seed=int(rng.integers(1 << 62)),
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_returns_the_first_of_the_likeliest_ids(kernel, width):
    torch.manual_seed(width)
    logits = torch.randint(-5, 5, (9, width + 3)).float()[:, :width]

    assert torch.equal(kernel.argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("spread", [0.0, 0.3, 8.0])
def test_draws_are_those_of_torch(kernel, width, spread):
    rng = np.random.default_rng(width)
    torch.manual_seed(width)
    logits = torch.randn(60, width) * spread
    params = [random_params(rng, width) for _ in range(60)]

    assert choose(logits, params, kernel) == choose(logits, params, None)


def test_draws_among_many_ties_are_those_of_torch(kernel):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    logits = torch.randint(-2, 3, (80, 2000)).float()
    params = [random_params(rng, 2000) for _ in range(80)]

    assert choose(logits, params, kernel) == choose(logits, params, None)


def test_masked_ids_are_never_drawn(kernel):
    logits = torch.full((200, 3000), float("-inf"))
    logits[:, 7], logits[:, 2500] = 1.0, 1.5
    params = [
        SamplingParams(top_p=(1.0, 0.99)[seed % 2], top_k=(0, 40)[seed % 3 == 0], seed=seed)
        for seed in range(200)
    ]

    assert set(choose(logits, params, kernel)) == {7, 2500}


def test_nan_neither_crashes_nor_leaves_the_vocabulary(kernel):
    logits = torch.randn(60, 5000)
    logits[::2, 1000:] = float("nan")
    rng = np.random.default_rng(3)

    ids = choose(logits, [random_params(rng, 5000) for _ in range(60)], kernel)

    assert all(0 <= token_id < 5000 for token_id in ids)


def test_ids_are_stored_at_their_indices(kernel):
    table = torch.zeros(50, dtype=torch.int32)

    kernel.store(torch.tensor([7, 8, 9]), torch.tensor([40, 0, 13]), table)

    assert {place: int(table[place]) for place in table.nonzero()[:, 0].tolist()} == {
        40: 7, 0: 8, 13: 9,
    }  # fmt: skip
