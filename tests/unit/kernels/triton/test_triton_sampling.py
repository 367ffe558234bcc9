"""The GPU's sampling kernels in Triton's interpreter: the same ids as the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.triton import sampling as triton_sampling
from trimaran.worker.sampling import noise
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import RowFeature, SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

CPU = torch.device("cpu")
NUM_PROMPT = 3


class Sampled:
    """One step's rows, entered for the CPU and for the kernels."""

    def __init__(self, params, lengths=None, vocab_size=1000):
        self.rows = SamplingRows(len(params) + 2, vocab_size, CPU)
        self.state = DeviceSamplingState(len(params) + 2, CPU)
        for place, each in enumerate(params):
            new = NewRow(
                row=place + 2,
                token_ids=int32s([1] * NUM_PROMPT),
                num_prompt_tokens=NUM_PROMPT,
                sequence_index=place % 3,
                sampling=each.to_wire(),
            )
            self.rows.enter(new)
            self.state.enter(new, each)
        # Rows in another order than entered: entry i is not row i.
        self.order = int32s(np.arange(len(params), 0, -1) + 1)
        self.lengths = int32s(lengths or [NUM_PROMPT + 5] * len(params))

    def on_cpu(self, logits):
        batch = self.rows.batch(self.order, self.lengths)
        sampler = HostSampler(SingleRankGroup())
        return sampler.sample(logits.float().clone(), batch, torch.zeros(1, 1)).token_ids

    def by_kernels(self, logits):
        wants = self.rows.batch(self.order, self.lengths).all_features
        return triton_sampling.draw(
            logits,
            torch.from_numpy(self.order),
            torch.from_numpy(self.lengths),
            self.state.tensor(),
            has_filters=bool(wants & RowFeature.FILTER),
        )


@pytest.mark.matrix(keep=5)
@pytest.mark.parametrize("vocab_size", [7, 4096, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_are_those_of_the_cpu(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    temperatures = [0.0, 0.2, 1.0, 3.0, 1e-6, 40.0]
    seeds = [int(seed) for seed in rng.integers(0, 2**64, 6, dtype=np.uint64)]
    params = [
        SamplingParams(top_p=1.0, temperature=temperature, seed=seed)
        for temperature, seed in zip(temperatures, seeds, strict=True)
    ]
    sampled = Sampled(params, [4, 3, 90, 7, 5, 12])
    # Rows are parts of a wider table, as logits of a padded vocabulary are.
    logits = (torch.randn(6, vocab_size + 3) * 4).to(dtype)[:, :vocab_size]

    assert torch.equal(sampled.by_kernels(logits), sampled.on_cpu(logits))


@pytest.mark.parametrize("has_filters", [False, True])
def test_stored_ids_are_the_draws_and_go_to_the_table_and_to_the_ring_slot(has_filters):
    filters = {"top_k": 5, "top_p": 0.9} if has_filters else {"top_p": 1.0}
    params = [
        SamplingParams(**filters, temperature=temperature, seed=7)
        for temperature in (0.0, 1.0, 3.0)
    ]
    sampled = Sampled(params)
    logits = torch.randn(4, 9001) * 4
    # The last entry is padding.
    rows = torch.from_numpy(np.append(sampled.order, np.int32(-1)))
    lengths = torch.from_numpy(np.append(sampled.lengths, np.int32(0)))
    table, output_ids = (
        torch.zeros(5, 30, dtype=torch.int32),
        torch.zeros(3, 8, dtype=torch.int32),
    )
    indices = torch.tensor([41, 63, 145, 29])
    ring_slot = torch.tensor([2], dtype=torch.int32)
    target = triton_sampling.IdTargets(indices, table, output_ids, ring_slot)
    state = sampled.state.tensor()
    triton_sampling.draw_and_store(
        logits, rows, lengths, state, target, has_filters=has_filters
    )

    expected = sampled.by_kernels(logits[:3])
    assert torch.equal(output_ids[2, :3], expected.int())
    assert not output_ids[:2].any() and not output_ids[2, 4:].any()
    assert torch.equal(table.view(-1)[indices[:3]], expected.int())


LANE, TILE = 8, 2048


@pytest.mark.parametrize("distance", [2 * LANE, TILE + LANE, TILE, 3 * TILE])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_best_score_wins_whichever_id_has_the_best_bound(distance, is_first, monkeypatch):
    monkeypatch.setattr(triton_sampling, "_PROGRAMS", 1)  # one takes all tiles
    vocab_size = 4 * TILE + 100
    sampled = Sampled([SamplingParams(top_p=1.0, seed=11)])
    keys = noise.noise_keys(*(np.array([x], dtype=np.uint64) for x in (11, 0, 5)))
    gumbel = noise.gumbel(torch.from_numpy(keys), torch.arange(vocab_size)[None])[0]
    # The uniform number bounds an exponential wait from below, far below long waits.
    waits = (-gumbel).exp()
    shift = distance if is_first else -distance
    loser = next(
        each
        for each in range(max(0, -shift), vocab_size - max(0, shift))
        if waits[each] > 0.8 and waits[each + shift] < 0.1
    )
    winner = loser + shift
    logits = torch.full((1, vocab_size), -60.0)
    logits[0, loser] = 5.0 - gumbel[loser]
    logits[0, winner] = 5.001 - gumbel[winner]

    assert sampled.by_kernels(logits).tolist() == [winner]
    assert sampled.on_cpu(logits).tolist() == [winner]


FILTERS = [
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 300, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 5000},
    {"top_k": 1500, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.2},
    {"top_p": 1e-6},
    {"top_p": 1.0, "min_p": 0.1},
    {"top_p": 0.7, "min_p": 0.3, "temperature": 0.7},
    {"top_p": 0.9, "top_p_decay": 0.8, "top_p_min": 0.4},
    {"top_p": 0.999, "temperature": 20.0},
    {"top_p": 1.0},
    {},
    {"temperature": 0.0, "top_k": 40, "min_p": 0.1},
]


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    ("vocab_size", "kind", "filters"),
    [
        (50, "tied", FILTERS[::2]),
        (50, "tied", FILTERS[1::2]),
        (5001, "flat", FILTERS),
        (5001, "peaked", FILTERS),
    ],
)
def test_filtered_draws_are_those_of_the_cpu(vocab_size, kind, filters):
    torch.manual_seed(vocab_size)
    params = [SamplingParams(**fields, seed=1) for fields in filters]
    logits = torch.randn(len(params), vocab_size) * (5 if kind == "peaked" else 0.1)
    if kind == "tied":
        logits = torch.randint(-2, 2, logits.shape).float()
    sampled = Sampled(params)

    assert torch.equal(sampled.by_kernels(logits), sampled.on_cpu(logits))


def test_filters_read_half_precision_logits_without_a_copy():
    torch.manual_seed(8)
    params = [SamplingParams(**fields, seed=9) for fields in FILTERS[2::4]]
    logits = (torch.randn(len(params), 3000) * 2).half()
    sampled = Sampled(params)

    assert torch.equal(sampled.by_kernels(logits), sampled.on_cpu(logits))


def test_the_lowest_id_wins_among_equal_logits_and_masked_ids_never():
    logits = torch.full((4, 9000), float("-inf"))
    logits[:2, [5, 4500]] = 1.0
    logits[2:, 8999] = -1e4
    greedy, random = SamplingParams(), SamplingParams(top_p=1.0)
    sampled = Sampled([random, greedy, random, greedy])

    drawn = sampled.by_kernels(logits).tolist()

    assert drawn[0] == 5
    assert drawn[1] in (5, 4500)
    assert drawn[2:] == [8999, 8999]


@pytest.mark.matrix(keep=0)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fields", [FILTERS[0], FILTERS[2], FILTERS[5], FILTERS[9]])
def test_nan_logits_give_a_valid_id_and_change_no_other_row(fields):
    torch.manual_seed(4)
    logits = torch.randn(3, 600)
    sampled = Sampled([SamplingParams(**fields, seed=7)] * 3)
    expected = sampled.on_cpu(logits)
    logits[0] = float("nan")
    logits[2, 200:] = float("nan")

    ids = sampled.by_kernels(logits).tolist()

    assert ids[1] == expected[1]
    assert all(0 <= token < 600 for token in ids)


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("fields", [FILTERS[0], FILTERS[5], {"top_p": 1.0}, {}])
def test_entries_without_a_row_are_skipped(fields):
    torch.manual_seed(5)
    logits = torch.randn(3, 3000)
    sampled = Sampled([SamplingParams(**fields, seed=7)] * 3)
    expected = sampled.on_cpu(logits)
    new = NewRow(row=0, token_ids=int32s([1]), num_prompt_tokens=1)
    sampled.state.enter(new, SamplingParams())
    wants = sampled.rows.batch(sampled.order, sampled.lengths).all_features
    rows = torch.from_numpy(sampled.order).clone()
    rows[1] = -1

    ids = triton_sampling.draw(
        logits, rows, torch.from_numpy(sampled.lengths), sampled.state.tensor(),
        has_filters=bool(wants & RowFeature.FILTER),
    ).tolist()  # fmt: skip

    assert [ids[0], ids[2]] == [expected[0], expected[2]]
    assert ids[1] == 0


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("num_shards", [3, 2])
def test_the_best_key_of_all_shards_is_the_draw_from_all_ids(num_shards):
    vocab_size = 9001
    params = [
        SamplingParams(top_p=1.0, temperature=temperature, seed=seed)
        for seed, temperature in enumerate([0.0, 0.2, 1.0, 3.0, 1.0, 40.0])
    ]
    sampled = Sampled(params, [4, 3, 90, 7, 5, 12], vocab_size)
    logits = (torch.randn(6, vocab_size) * 4).bfloat16()
    # Equal likeliest ids in two shards: the lower wins.
    logits[-1, [5, vocab_size - 1]] = 60.0

    keys, first = [], 0
    for shard in logits.tensor_split(num_shards, 1):
        rows, lengths = torch.from_numpy(sampled.order), torch.from_numpy(sampled.lengths)
        keys.append(
            triton_sampling.best_keys(shard, first, rows, lengths, sampled.state.tensor())
        )
        first += shard.shape[1]

    ids = 0x7FFFFFFF - (torch.stack(keys).amax(0) & 0x7FFFFFFF)
    assert torch.equal(ids, sampled.by_kernels(logits))
    assert int(ids[-1]) == 5
