"""Sampled outputs with drafts have the distribution of the model, whatever the drafts have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.draft_tree import accepted_path
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

VOCAB, CHAINS, DRAFTS = 64, 500, 3
PARAMS = {
    "temperature": {"temperature": 1.3},
    "low temperature": {"temperature": 0.4},
    "top k": {"top_k": 9, "temperature": 0.9},
    "top p": {"top_p": 0.7},
    "top k and top p": {"top_k": 20, "top_p": 0.8, "temperature": 1.2},
}


def law(logits_V, params):
    """The probabilities of the next id by definition, in float64."""
    order = np.argsort(-logits_V, kind="stable")[: params.top_k or None]
    mass = np.exp((logits_V[order] - logits_V.max()) / params.temperature)
    mass /= mass.sum()
    if 0 < params.top_p < 1:
        mass *= np.cumsum(mass) - mass < params.top_p
        mass /= mass.sum()
    found = np.zeros(VOCAB)
    found[order] = mass
    return found


def check_law(counts_VV, p_VV, num_tests):
    """Counts of pairs of ids have these probabilities of the second id after the first, by a
    chi-squared test, of which there are ``num_tests``."""
    expected = p_VV * counts_VV.sum(1)[:, None]
    assert not counts_VV[expected == 0].any()
    is_common = expected >= 5
    statistic = ((counts_VV - expected)[is_common] ** 2 / expected[is_common]).sum()
    # All rare pairs of an id count as one.
    rare = np.where(is_common, 0, expected).sum(1), np.where(is_common, 0, counts_VV).sum(1)
    has_rare = rare[0] >= 5
    statistic += ((rare[1] - rare[0])[has_rare] ** 2 / rare[0][has_rare]).sum()
    free = is_common.sum() + has_rare.sum() - VOCAB
    halves = torch.tensor([free / 2, statistic / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(halves[0], halves[1]))
    assert p_value > 0.01 / num_tests


def draw_chains(logits_VV, drafts_VV, params, num_tokens):
    """Outputs of a model whose next id depends on the last one, ``CHAINS`` sequences at once.

    Each round verifies ``DRAFTS`` tokens of another such model, as steps of an engine do.
    """
    rows = SamplingRows(CHAINS, VOCAB, torch.device("cpu"))
    for row in range(CHAINS):
        wire = {**params.to_wire(), "seed": row}
        rows.enter(NewRow(row=row, token_ids=int32s([0]), num_prompt_tokens=1, sampling=wire))
    sampler, rng = HostSampler(SingleRankGroup()), np.random.default_rng(5)
    outputs = [[0] for _ in range(CHAINS)]
    table = torch.zeros((CHAINS, 1), dtype=torch.int32)
    own_row, accepted = np.repeat(np.arange(CHAINS, dtype=np.int32), DRAFTS + 1), 0
    while sum(map(len, outputs)) < num_tokens:
        path = np.array([[output[-1]] for output in outputs])
        for _ in range(DRAFTS):
            noise = rng.gumbel(size=(CHAINS, VOCAB))
            path = np.c_[path, (drafts_VV[path[:, -1]] + noise).argmax(1)]
        lengths = np.add.outer([len(output) for output in outputs], range(DRAFTS + 1))
        batch = rows.batch(own_row, lengths.reshape(-1).astype(np.int32))
        logits = torch.tensor(logits_VV[path.reshape(-1)], dtype=torch.float32)
        ids = sampler.sample(logits, batch, table).token_ids.view(CHAINS, -1).tolist()
        for output, own, drafted in zip(outputs, ids, path[:, 1:].tolist(), strict=True):
            count = len(accepted_path(None, drafted, own))
            accepted += count
            output += own[: count + 1]
    assert accepted > num_tokens // 20
    return outputs


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("num_tokens", [40_000, 1_000_000])
@pytest.mark.parametrize("name", PARAMS)
def test_pairs_of_tokens_follow_the_law_of_the_model(name, num_tokens):
    params = SamplingParams(**{"top_p": 1.0, **PARAMS[name]})
    rng = np.random.default_rng(7)
    logits_VV = rng.normal(0, 2, (VOCAB, VOCAB))
    # The drafts agree with the model now and then.
    drafts_VV = logits_VV + rng.normal(0, 1, (VOCAB, VOCAB))

    outputs = draw_chains(logits_VV, drafts_VV, params, num_tokens)

    counts = np.zeros((VOCAB, VOCAB))
    for output in outputs:
        np.add.at(counts, (output[:-1], output[1:]), 1)
    p_VV = np.array([law(row, params) for row in logits_VV])
    check_law(counts, p_VV, num_tests=len(PARAMS))
