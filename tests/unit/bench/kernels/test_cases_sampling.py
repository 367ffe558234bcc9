"""Timed cases of sampling: they run, and agree with torch where both are determined."""

from __future__ import annotations

import torch

from trimaran.bench.kernels import cases_sampling
from trimaran.comm.messages.sampling_params import SamplingParams


def test_cases_give_the_results_of_torch():
    sets = [torch.randn(2, 5000).half()]
    greedy = cases_sampling._draw("greedy", SamplingParams(), sets)
    assert greedy.peer is not None
    assert torch.equal(greedy.run(), greedy.peer())
    assert greedy.num_bytes == 2 * 5000 * 2

    log_probs = cases_sampling._log_probs(sets)
    assert log_probs.peer is not None
    torch.testing.assert_close(log_probs.run(), log_probs.peer()[:, 0])


def test_draws_of_every_kind_are_ids():
    sets = [torch.randn(1, 5000).half()]
    for name, params in cases_sampling.KINDS.items():
        assert 0 <= int(cases_sampling._draw(name, params, sets).run()) < 5000
