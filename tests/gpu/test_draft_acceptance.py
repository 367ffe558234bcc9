"""Draft tokens that are accepted by their probabilities, on a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.test_speculation import ASKED, WAYS, make_driver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("way", WAYS)
def test_draft_logits_and_thresholds_decide(folder, way):
    driver = make_driver(folder, ASKED, **WAYS[way])
    prompt = [3, 1, 4, 1, 5]
    sampling = {"top_k": 50, "top_p": 0.95, "temperature": 1.5, "repetition_penalty": 1.2}
    drawn = driver.submit(
        prompt, seed=5, return_generation_logits=True, max_tokens=6, **sampling
    )
    driver.run(max_steps=100_000)
    ids = tuple(driver.output(drawn))
    logits = b"".join(driver.told(drawn, "generation_logits"))
    found = []
    for rule in ({"draft_logits": logits}, {"draft_acceptance_threshold": 1e-30}):
        asked = {"draft_token_ids": ids, "ends_after_drafts": True, **sampling, **rule}
        for seed in range(4):
            again = driver.submit(prompt, seed=seed, max_tokens=9, **asked)
            driver.run(max_steps=100_000)
            found.append(driver.output(again))

    # Draft logits of the same law reject no id, whatever the seed.
    assert {tuple(output[:6]) for output in found} == {ids}
    assert {len(output) for output in found} == {7}
