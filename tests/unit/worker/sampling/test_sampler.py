"""Sampling follows the distribution that the parameters define, row by row."""

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.sampling.candidates import largest
from trimaran.worker.sampling.noise import gumbel, hash_bits, noise_keys
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

CPU = torch.device("cpu")
SAMPLER = HostSampler(SingleRankGroup())
PROMPT = [1, 2, 3]
POSITIONS = 100


def draw(logits, params, *, outputs=None, indices=None):
    """Sample one id a row; ``outputs`` are the ids that follow the prompt of each row."""
    count, vocab_size = logits.shape
    outputs = outputs or [[]] * count
    table = torch.zeros((count, 64), dtype=torch.int32)
    rows = SamplingRows(count, vocab_size, CPU)
    for row in range(count):
        ids = PROMPT + outputs[row]
        table[row, : len(ids)] = torch.tensor(ids)
        rows.enter(
            NewRow(
                row=row,
                token_ids=int32s(ids),
                num_prompt_tokens=len(PROMPT),
                sequence_index=indices[row] if indices else 0,
                sampling=params[row].to_wire(),
            )
        )
    lengths = int32s([len(PROMPT) + len(output) for output in outputs])
    batch = rows.batch(np.arange(count, dtype=np.int32), lengths)
    return SAMPLER.sample(logits.clone(), batch, table)


def repeated(logits_V, params, count):
    """``count`` independent draws from one distribution: seeds 0, 1, 2 and so on, each at
    its first ``POSITIONS`` output positions."""
    num_rows = -(-count // POSITIONS)
    rows = SamplingRows(num_rows, len(logits_V), CPU)
    wire = params.to_wire()
    for row in range(num_rows):
        ids = int32s(PROMPT)
        sampling = {**wire, "seed": row}
        new = NewRow(row=row, token_ids=ids, num_prompt_tokens=len(PROMPT), sampling=sampling)
        rows.enter(new)
    draws = np.arange(count, dtype=np.int32)
    batch = rows.batch(draws // POSITIONS, len(PROMPT) + draws % POSITIONS)
    table = torch.zeros((num_rows, len(PROMPT) + POSITIONS), dtype=torch.int32)
    logits = torch.as_tensor(logits_V, dtype=torch.float32).repeat(count, 1)
    return SAMPLER.sample(logits, batch, table).token_ids.numpy()


def chi_square(ids, probabilities):
    counts = np.bincount(ids, minlength=len(probabilities))
    is_possible = probabilities > 0
    assert counts[~is_possible].sum() == 0
    expected = probabilities[is_possible] * len(ids)
    return float(((counts[is_possible] - expected) ** 2 / expected).sum())


LOGITS = np.log(np.array([0.02, 0.3, 0.05, 0.13, 0.2, 0.08, 0.12, 0.1]))


def kept(ids):
    probabilities = np.zeros(8)
    probabilities[ids] = np.exp(LOGITS)[ids]
    return probabilities / probabilities.sum()


def tempered(temperature):
    probabilities = np.exp(LOGITS / temperature)
    return probabilities / probabilities.sum()


@pytest.mark.feature(
    "input:runtime_top_k", "input:runtime_top_p", "input:runtime_min_p", "input:temperature"
)
@pytest.mark.parametrize(
    ("fields", "probabilities"),
    [
        ({"top_p": 1.0}, kept(range(8))),
        ({"top_p": 1.0, "temperature": 2.0}, tempered(2.0)),
        ({"top_p": 1.0, "temperature": 0.5}, tempered(0.5)),
        ({"top_k": 3}, kept([1, 4, 3])),
        ({"top_p": 0.49}, kept([1, 4])),
        ({"top_p": 0.51}, kept([1, 4, 3])),
        # The three ids left after top-k have 0.476, 0.317 and 0.206 of the mass.
        ({"top_k": 3, "top_p": 0.7}, kept([1, 4])),
        ({"min_p": 0.35}, kept([1, 4, 3, 6])),
        ({"top_k": 5, "min_p": 0.5}, kept([1, 4])),
        ({"top_k": 1024}, kept(range(8))),
    ],
)
def test_draws_follow_the_filtered_softmax(fields, probabilities):
    ids = repeated(LOGITS, SamplingParams(**fields), 50_000)

    # At most 7 degrees of freedom: above 24.3 once in 1,000 correct sets.
    assert chi_square(ids, probabilities) < 24.3


def test_consecutive_positions_of_one_sequence_are_independent_draws():
    count = 8000
    rows = SamplingRows(1, 8, CPU)
    wire = SamplingParams(top_p=1.0, seed=5).to_wire()
    rows.enter(NewRow(row=0, token_ids=int32s([1]), num_prompt_tokens=1, sampling=wire))
    positions = np.arange(count, dtype=np.int32)
    batch = rows.batch(np.zeros_like(positions), 1 + positions)
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(count, 1)
    ids = SAMPLER.sample(logits, batch, torch.zeros((1, 1))).token_ids.numpy()

    assert chi_square(ids, kept(range(8))) < 24.3
    pairs = ids[:-1] * 8 + ids[1:]
    joint = np.outer(kept(range(8)), kept(range(8))).ravel()
    # 63 degrees of freedom: above 103.4 once in 1,000.
    assert chi_square(pairs, joint) < 103.4


def test_a_row_draws_the_same_beside_any_other_rows():
    torch.manual_seed(0)
    logits = torch.randn(40, 300) * 3
    kinds = [
        SamplingParams(top_k=5, seed=3),
        SamplingParams(top_p=0.9, seed=4),
        SamplingParams(top_p=1.0, seed=5),
        SamplingParams(),
        SamplingParams(top_p=1.0, min_p=0.02, seed=6),
        SamplingParams(top_k=50, top_p=0.8, seed=1 << 63, repetition_penalty=1.3),
        SamplingParams(frequency_penalty=0.5, min_tokens=4, end_id=7),
        SamplingParams(top_p=0.999, temperature=20.0, seed=8),
    ]
    params = [kinds[row % len(kinds)] for row in range(40)]
    together = draw(logits, params).token_ids.tolist()

    alone = [int(draw(logits[row : row + 1], [params[row]]).token_ids[0]) for row in range(40)]

    assert together == alone


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 2}, {"top_p": 1.0}])
def test_seed_sequence_index_and_position_each_change_the_draw(fields):
    logits = torch.zeros(1, 1000)
    if "top_k" in fields:
        fields = {"top_k": 500}

    def one(seed=1, index=0, outputs=()):
        params = [SamplingParams(**fields, seed=seed)]
        return int(draw(logits, params, outputs=[list(outputs)], indices=[index]).token_ids)

    assert one() == one()
    assert len({one(), one(seed=2), one(index=1), one(outputs=[9])}) == 4


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.0, "top_p": 0.9}, {"top_k": 1}, {"temperature": 0.0, "top_k": 50}],
)
def test_greedy_takes_the_first_of_the_likeliest(fields):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [9.0, -1.0, 9.0, 2.0]])

    assert draw(logits, [SamplingParams(**fields)] * 2).token_ids.tolist() == [1, 0]


def test_top_k_keeps_the_lower_ids_among_equal_logits():
    logits = torch.zeros(400, 64)
    params = [SamplingParams(top_k=3, seed=seed) for seed in range(400)]

    assert set(draw(logits, params).token_ids.tolist()) == {0, 1, 2}


def test_the_order_of_candidates_does_not_depend_on_their_number():
    torch.manual_seed(1)
    # Few different values: ties everywhere, also at every edge.
    logits = torch.randint(-3, 3, (5, 200)).float()
    _, all_ids = largest(logits, 200)

    for count in (1, 7, 50, 199):
        values, ids = largest(logits, count)
        assert torch.equal(ids, all_ids[:, :count])
        assert torch.equal(values, logits.gather(1, ids))


@pytest.mark.parametrize(
    ("num_outputs", "left"), [(0, [1, 4, 3, 6]), (1, [1, 4]), (2, [1]), (9, [1])]
)
def test_top_p_decays_with_every_token_down_to_its_minimum(num_outputs, left):
    # 0.72, then 0.36, then never below 0.25.
    params = [
        SamplingParams(top_p=0.72, top_p_decay=0.5, top_p_min=0.25, seed=seed)
        for seed in range(300)
    ]
    logits = torch.as_tensor(LOGITS, dtype=torch.float32).repeat(300, 1)

    ids = draw(logits, params, outputs=[[5] * num_outputs] * 300).token_ids.tolist()

    assert set(ids) == set(left)


def test_the_minimum_of_top_p_applies_only_to_rows_with_a_decay():
    # A minimum top-p of 1 raises the top-p in neither row.
    params = [SamplingParams(top_p=0.25, top_p_min=1.0, seed=seed) for seed in range(300)]
    params += [
        SamplingParams(top_p=0.49, top_p_decay=0.5, top_p_min=1.0, seed=seed)
        for seed in range(100)
    ]
    logits = torch.as_tensor(LOGITS, dtype=torch.float32).repeat(400, 1)

    ids = draw(logits, params, outputs=[[5]] * 300 + [[]] * 100).token_ids.tolist()

    assert set(ids[:300]) == {1}
    assert set(ids[300:]) <= {1, 4}


@pytest.mark.parametrize(
    ("output", "left"),
    [
        ([5, 5, 9], [1, 4, 3, 6]),
        ([5, 9, 5], [1, 4]),
        ([9, 9, 5, 5], [1]),
        ([5], [1, 4]),
        ([], [1, 4, 3, 6]),
    ],
)
def test_the_reset_id_restores_a_decayed_top_p(output, left):
    params = [
        SamplingParams(
            top_p=0.72, top_p_decay=0.5, top_p_min=0.25, top_p_reset_ids=9, seed=seed
        )
        for seed in range(300)
    ]
    logits = torch.as_tensor(LOGITS, dtype=torch.float32).repeat(300, 1)

    ids = draw(logits, params, outputs=[output] * 300).token_ids.tolist()

    assert set(ids) == set(left)


def test_a_row_of_nan_changes_no_other_row():
    torch.manual_seed(3)
    logits = torch.randn(2, 600)
    params = [SamplingParams(top_k=5, top_p=0.9, seed=1)] * 2
    expected = draw(logits, params).token_ids.tolist()[1]
    logits[0, 100:] = float("nan")

    ids = draw(logits, params).token_ids.tolist()

    assert ids[1] == expected
    assert 0 <= ids[0] < 600


def test_the_end_id_is_masked_until_min_tokens():
    logits = torch.tensor([[0.0, 5.0, 1.0, 2.0]] * 3)
    params = [SamplingParams(end_id=1, min_tokens=count) for count in (1, 2, 2)]

    ids = draw(logits, params, outputs=[[], [0], [0, 0]]).token_ids.tolist()

    assert ids == [1, 3, 1]


def test_further_end_ids_are_masked_until_min_tokens_too():
    logits = torch.tensor([[0.0, 5.0, 4.0, 2.0]] * 3)
    ends = ({"end_id": 1, "end_ids": (2,)}, {"end_ids": (1, 2)}, {"end_id": 1})
    params = [SamplingParams(min_tokens=3, **each) for each in ends]

    ids = draw(logits, params, outputs=[[0], [0], [0]]).token_ids.tolist()

    assert ids == [3, 3, 2]


def test_repetition_penalty_scales_seen_ids_of_prompt_and_output():
    logits = torch.tensor([[1.0, 1.5, -1.0, 0.0, 2.4, 1.3]])
    penalised = SamplingParams(repetition_penalty=2.0)

    # 1.5 becomes 0.75 (prompt) and 2.4 becomes 1.2 (output); 1.3 is left the largest.
    assert draw(logits, [penalised], outputs=[[4]]).token_ids.tolist() == [5]
    assert draw(logits, [penalised]).token_ids.tolist() == [4]


def test_frequency_counts_and_presence_does_not_and_prompts_are_free():
    logits = torch.tensor([[0.0, 3.0, 0.0, 0.0, 2.9, 2.0]])
    outputs = [[4, 4]]

    def best(**fields):
        params = [SamplingParams(**fields)]
        return draw(logits + torch.tensor([0, 0, 0, 0, 1.0, 0]), params, outputs=outputs)

    assert best(frequency_penalty=0.4).token_ids.tolist() == [4]
    assert best(frequency_penalty=0.5).token_ids.tolist() == [1]
    assert best(presence_penalty=0.5).token_ids.tolist() == [4]
    assert best(presence_penalty=1.0).token_ids.tolist() == [1]


def test_a_bad_word_is_masked_only_after_its_beginning():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3)
    params = [SamplingParams(bad_words=((4, 5), (1, 2, 3, 4)))] * 2
    params.append(SamplingParams(bad_words=((5,),)))

    ids = draw(logits, params, outputs=[[4], [], []]).token_ids.tolist()

    # The prompt is 1 2 3: in the second row 4 is masked, in the first only 5.
    assert ids == [4, 5, 4]
    logits[1, 5] = -9.0
    assert draw(logits, params, outputs=[[4], [], []]).token_ids.tolist()[1] == 3


def test_no_ngram_is_repeated():
    logits = torch.tensor([[0.0, 5.0, 4.0, 3.0]])
    params = [SamplingParams(no_repeat_ngram_size=2)]

    # 1 2 3 1 so far: 1 2 would repeat, so the next may be 1 (the largest) but not 2.
    assert draw(logits, params, outputs=[[1]]).token_ids.tolist() == [1]
    logits[0, 1] = 0.0
    assert draw(logits, params, outputs=[[1]]).token_ids.tolist() == [3]


def test_embedding_bias_is_added_to_its_row_only():
    bias = np.zeros(4, dtype="<f4")
    bias[2] = 10.0
    params = [SamplingParams(embedding_bias=bias.tobytes()), SamplingParams()]

    ids = draw(torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 2), params).token_ids.tolist()

    assert ids == [2, 0]


def test_log_probs_are_the_models_own():
    torch.manual_seed(2)
    logits = torch.randn(3, 50)
    params = [
        SamplingParams(return_log_probs=True),
        SamplingParams(top_k=10, seed=1, temperature=0.3, return_log_probs=True),
        SamplingParams(),
    ]

    output = draw(logits, params)

    expected = logits.log_softmax(-1).gather(1, output.token_ids[:, None])[:, 0]
    torch.testing.assert_close(output.log_probs, expected)


def test_noise_bits_match_the_definition():
    """Computed again with Python's own integers."""
    keys = noise_keys(
        np.array([3], dtype=np.uint64),
        np.array([2], dtype=np.uint64),
        np.array([7], dtype=np.uint64),
    )
    first, second = (int(word) & 0xFFFFFFFF for word in keys[0])
    ids = [0, 1, 31999, 150000]
    expected = []
    for token_id in ids:
        x = (token_id * 0x9E3779B1 & 0xFFFFFFFF) ^ first
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = ((x ^ x >> 15) ^ second) * 0x846CA68B & 0xFFFFFFFF
        expected.append(x ^ x >> 16)

    bits = hash_bits(torch.from_numpy(keys), torch.tensor([ids]))

    assert [int(value) & 0xFFFFFFFF for value in bits[0]] == expected


def test_noise_is_standard_gumbel():
    count = 1 << 20
    keys = noise_keys(*(np.array([n], dtype=np.uint64) for n in (1, 2, 3)))
    noise = gumbel(torch.from_numpy(keys), torch.arange(count)[None]).double()

    assert torch.isfinite(noise).all()
    # Mean and variance of the standard Gumbel distribution, within 4 standard errors.
    assert abs(float(noise.mean()) - 0.5772157) < 4 * (1.6449 / count) ** 0.5
    assert abs(float(noise.var()) - 1.6449341) < 0.012
