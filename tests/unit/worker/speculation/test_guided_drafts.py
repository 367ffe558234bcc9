"""Guided outputs with draft tokens are those without, whatever the drafts are."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from tests.unit.worker.guided_engine import END, GUIDES, ROOT, ids, make_engine, submit
from trimaran.worker.config.speculation_config import SpeculationConfig

NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=6, is_adaptive=False)
HEADS = SpeculationConfig(
    drafter="eagle", draft_dir=str(ROOT / "examples" / "draft_heads" / "eagle"),
    max_draft_tokens=4, is_adaptive=False,
)  # fmt: skip
TREES = dataclasses.replace(
    HEADS, max_draft_tokens=64, tree=((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0))
)
LOOKAHEAD = SpeculationConfig(drafter="lookahead", max_draft_tokens=6, is_adaptive=False)
LONG = "((red|green|blue) [0-9]{2}, ){6}"
MORE = {
    **GUIDES,
    "long": ("regex", LONG),
    "list": ("json_schema", json.dumps({
        "type": "array", "items": {"enum": ["one fish", "two fish"]}, "minItems": 5,
        "maxItems": 8,
    })),
    "builtin": ("json", ""),
}  # fmt: skip
WAYS = {
    "one step at a time": {},
    "overlapped": {"depth": 2},
    "paused": {"max_tokens": 256},
}


@pytest.fixture
def serve():
    """A function that makes a driver for one test, with these changes."""
    drivers = []

    def make(speculation=NGRAM, **changes):
        drivers.append(make_engine(speculation=speculation, **changes))
        return drivers[-1]

    yield make
    for made in drivers:
        made.engine.shutdown()


def fields_of(number):
    """Sampling parameters of the request of this number."""
    return (
        {"seed": number},
        {"top_k": 1},
        {
            "seed": number,
            "temperature": 3.0,
            "frequency_penalty": 0.2,
            "return_log_probs": True,
        },
        {"seed": number, "end_id": -1},
        {"seed": number, "num_return_sequences": 2},
        {"seed": number, "min_tokens": 5, "stop_words": ((ids("blue")[0],),)},
    )[number % 6]


def run(driver, kinds, drafts):
    """What each request's client gets: ids, reasons and log-probabilities."""
    requests = []
    for number, kind in enumerate(kinds):
        name, guide = MORE[kind] if isinstance(MORE[kind], tuple) else (kind, None)
        fields = {"max_tokens": 40, **fields_of(number), **drafts[number]}
        requests.append(submit(driver, name, guide, **fields))
        driver.step()
    driver.run(max_steps=100_000)
    driver.check_idle()
    reasons = sorted(driver.reasons.items())
    return [
        (
            driver.outputs(each),
            [reason for key, reason in reasons if key[0] == each],
            driver.told(each, "log_probs"),
        )
        for each in requests
    ]


def check(told, expected):
    """Ids and reasons are equal; so are log-probabilities, but for rounding."""
    for (ids_, reasons, log_probs), own in zip(told, expected, strict=True):
        assert (ids_, reasons) == own[:2]
        assert log_probs == pytest.approx(own[2], abs=1e-3)


def corrupt(rng, output):
    """Drafts that are right, wrong from a place on, or followed by an end id or any ids."""
    place = rng.randrange(7)
    others = rng.choice([output[place:], [END] * 6, [rng.randrange(2, 500) for _ in range(6)]])
    return tuple([*output[:place], *others][:6])


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_guided_output(serve, way):
    rng = random.Random(way)
    driver = serve(**WAYS[way])
    counts = driver.engine.scheduler.draft_counts
    kinds = [kind for kind in MORE for _ in range(4)]
    expected = run(driver, kinds, [{"max_draft_tokens": 0}] * len(kinds))
    assert not counts.num_tokens
    drafts = [{"draft_token_ids": corrupt(rng, outputs[0])} for outputs, *_ in expected]

    for own in (drafts, [{}] * len(kinds)):
        before = counts.num_tokens, counts.num_accepted
        check(run(driver, kinds, own), expected)
        num_tokens, num_accepted = (
            counts.num_tokens - before[0],
            counts.num_accepted - before[1],
        )
        assert 0 < num_accepted < num_tokens


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize(
    "drafter", [HEADS, LOOKAHEAD, TREES], ids=["a network", "lookahead", "trees"]
)
@pytest.mark.parametrize("way", [*WAYS][::-1])
def test_drafts_of_a_network_and_of_lookahead_change_no_guided_output(serve, way, drafter):
    driver = serve(drafter, **WAYS[way])
    counts = driver.engine.scheduler.draft_counts
    kinds = [*MORE] * 2
    expected = run(driver, kinds, [{"max_draft_tokens": 0}] * len(kinds))

    check(run(driver, kinds, [{}] * len(kinds)), expected)
    assert 0 < counts.num_accepted < counts.num_tokens


def test_drafts_that_a_guide_forbids_have_no_rows(serve):
    driver = serve()
    first = submit(driver, "choice", seed=3, max_draft_tokens=0)
    driver.run()
    output = driver.output(first)
    wrong = tuple([*output[:2], ids("zebra")[0], *output[2:]][:6])

    again = submit(driver, "choice", seed=3, draft_token_ids=wrong)
    driver.run()

    assert driver.output(again) == output
    counts = driver.engine.scheduler.draft_counts
    assert counts.num_tokens == counts.num_accepted == 2
    driver.check_idle()
