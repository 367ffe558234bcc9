"""Draft tokens that are accepted by probability: by rejection sampling, or by a threshold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.worker.speculation.test_law import PARAMS, VOCAB, check_law, law
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.sampling.sampler import HostSampler
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import DraftRule, NewRow, int32s

CHAINS, DRAFTS = 2000, 3


class Verifier:
    """Many sequences of a model whose next id depends on the last one alone.

    ``logits[i]`` are those after id i, and ``drafts[i]`` those of the draft model.
    """

    def __init__(self, logits_VV, drafts_VV, params):
        self.logits, self.drafts, self.params = logits_VV, drafts_VV, params
        self.rows = SamplingRows(CHAINS, VOCAB, torch.device("cpu"))
        for row in range(CHAINS):
            wire = {**params.to_wire(), "seed": row}
            new = NewRow(row=row, token_ids=int32s([0]), num_prompt_tokens=1, sampling=wire)
            self.rows.enter(new)
        self.sampler = HostSampler(SingleRankGroup())
        self.draft_law = np.array([law(each, params) for each in drafts_VV])
        self.rng = np.random.default_rng(5)

    def paths(self, last):
        """int [CHAINS, 1 + DRAFTS]: each sequence's last id, and drafts behind it."""
        path = last[:, None]
        for _ in range(DRAFTS):
            bounds = self.draft_law[path[:, -1]].cumsum(1)
            coins = self.rng.random((CHAINS, 1)) * bounds[:, -1:]
            path = np.c_[path, (bounds <= coins).sum(1)]
        return path

    def verify(self, path, lengths, *, threshold=0.0, has_logits=True):
        """int [CHAINS, 1 + DRAFTS]: the id that each row samples."""
        width = DRAFTS + 1
        own_row = np.repeat(np.arange(CHAINS, dtype=np.int32), width)
        known = (lengths[:, None] + np.arange(width)).reshape(-1).astype(np.int32)
        batch = self.rows.batch(own_row, known)
        rows = np.arange(CHAINS * width).reshape(CHAINS, width)[:, :-1]
        logits = self.drafts[path[:, :-1].reshape(-1)].astype(np.float32)
        batch.draft_rules = [
            DraftRule(
                sampled_rows=int32s(rows.reshape(-1)),
                token_ids=int32s(path[:, 1:].reshape(-1)),
                threshold=threshold,
                logits=logits if has_logits else None,
            )
        ]
        table = torch.zeros((CHAINS, 1), dtype=torch.int32)
        mine = torch.tensor(self.logits[path.reshape(-1)], dtype=torch.float32)
        return self.sampler.sample(mine, batch, table).token_ids.view(CHAINS, width).numpy()


def models(noise=1.0):
    rng = np.random.default_rng(7)
    logits_VV = rng.normal(0, 2, (VOCAB, VOCAB))
    return logits_VV, logits_VV + rng.normal(0, noise, (VOCAB, VOCAB))


@pytest.mark.matrix(keep=1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_tokens", [40_000, 1_000_000])
@pytest.mark.parametrize("name", [*PARAMS][::-1])
def test_pairs_of_tokens_follow_the_law_of_the_model_by_rejection(name, num_tokens):
    params = SamplingParams(**{"top_p": 1.0, **PARAMS[name]})
    logits_VV, drafts_VV = models()
    chains = Verifier(logits_VV, drafts_VV, params)
    counts, last = np.zeros((VOCAB, VOCAB)), np.zeros(CHAINS, np.int64)
    lengths, num_accepted, num_drafts = np.ones(CHAINS, np.int64), 0, 0
    while counts.sum() < num_tokens:
        path = chains.paths(last)
        own = chains.verify(path, lengths)
        count = (own[:, :-1] == path[:, 1:]).cumprod(1).sum(1)
        is_output = np.arange(DRAFTS + 1) <= count[:, None]
        before = np.c_[last, own[:, :-1]]
        np.add.at(counts, (before[is_output], own[is_output]), 1)
        last = own[np.arange(CHAINS), count]
        lengths += count + 1
        num_accepted += count.sum()
        num_drafts += np.minimum(count + 1, DRAFTS).sum()

    p_VV = np.array([law(row, params) for row in logits_VV])
    check_law(counts, p_VV, num_tests=len(PARAMS))
    # The share of accepted drafts is the overlap of both distributions.
    frequency = counts.sum(1) / counts.sum()
    overlap = (np.minimum(p_VV, chains.draft_law).sum(1) * frequency).sum()
    assert num_accepted / num_drafts == pytest.approx(overlap, abs=0.02)


def test_drafts_that_their_logits_exclude_leave_the_own_draw():
    params = SamplingParams(top_k=5, temperature=0.9)
    logits_VV, drafts_VV = models()
    chains = Verifier(logits_VV, drafts_VV, params)
    last = np.arange(CHAINS) % VOCAB
    path = np.c_[last, np.repeat(drafts_VV[last].argmin(1)[:, None], DRAFTS, axis=1)]
    lengths = np.ones(CHAINS, np.int64)

    own = chains.verify(path, lengths)

    chains.drafts = chains.drafts * np.nan
    assert (own[:, 0] == chains.verify(path, lengths)[:, 0]).all()
    for row in range(20):
        allowed = np.flatnonzero(law(logits_VV[last[row]], params))
        assert own[row, 0] in allowed


@pytest.mark.parametrize("has_logits", [True, False])
@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_k": 4, "temperature": 1.5}])
def test_a_threshold_accepts_what_is_likely_enough(has_logits, sampling):
    params = SamplingParams(**sampling)
    logits_VV, drafts_VV = models()
    chains = Verifier(logits_VV, drafts_VV, params)
    path = chains.paths(np.arange(CHAINS) % VOCAB)
    lengths = np.ones(CHAINS, np.int64)

    own = chains.verify(path, lengths, threshold=0.2, has_logits=has_logits)

    plain = chains.verify(path, lengths, threshold=1e-300, has_logits=False)
    scale = sampling.get("temperature", 1.0)
    p, q = (np.exp(each / scale) for each in (logits_VV, drafts_VV))
    p, q = (each / each.sum(1, keepdims=True) for each in (p, q))
    q = q if has_logits else np.ones_like(q)
    before, drafts = path[:, :-1], path[:, 1:]
    is_likely = p[before, drafts] >= 0.2 * q[before, drafts]
    assert 0 < is_likely.mean() < 1
    assert (own[:, :-1][is_likely] == drafts[is_likely]).all()
    assert (plain[:, :-1] == drafts).all()
    assert (own[:, -1] == plain[:, -1]).all()
