"""Guides with slow masks: their requests fail, and other requests do not wait."""

from __future__ import annotations

import pytest

from tests.unit.worker.guided_engine import follows, ids, make_engine, submit, text_of
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import GuidedConfig

AMBIGUOUS = "root ::= root root root | root root | [a-z ]"
"""A text of n characters has more derivations than 2 to the power of n."""


@pytest.fixture(scope="module")
def serve():
    """A function that gives a driver with these limits of guides, the same one each time."""
    drivers = {}

    def make(depth=1, **limits):
        key = depth, *limits.items()
        if key not in drivers:
            guided = GuidedConfig(backend="xgrammar", **limits)
            drivers[key] = make_engine(depth=depth, guided=guided)
        return drivers[key]

    yield make
    for driver in drivers.values():
        driver.engine.shutdown()


def ambiguous(driver, **fields):
    return submit(driver, "ebnf_grammar", AMBIGUOUS, **{"max_tokens": 200, **fields})


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_whose_mask_exceeds_the_time_limit_fails_alone(serve, depth):
    driver = serve(depth, step_timeout_s=0.03)
    slow = ambiguous(driver)
    good = submit(driver, "regex")
    free = driver.submit(ids("It was a dark night"), max_tokens=40)

    driver.run(max_steps=1_000_000)

    assert "takes more than" in driver.failed[slow]
    assert "--guide-step-timeout" in driver.failed[slow]
    assert follows("regex", text_of(driver, good))
    assert len(driver.output(free)) == 40
    driver.check_idle()


def test_other_requests_continue_while_a_mask_is_computed(serve):
    driver = serve(step_timeout_s=1000.0, max_processes=1)
    slow = ambiguous(driver)
    while len(driver.output(slow)) < 25:
        driver.step()
    come = len(driver.output(slow))
    others = [driver.submit(ids("It was a dark night"), max_tokens=60) for _ in range(2)]

    while not all((request, 0) in driver.reasons for request in others):
        driver.step()

    # Steps of other requests are much faster than these masks.
    assert len(driver.output(slow)) - come < 60
    driver.engine.cancel("client", [slow])
    driver.run(max_steps=1_000_000)
    driver.check_idle()


def test_all_sequences_of_a_request_fail_together(serve):
    driver = serve(step_timeout_s=0.03)
    slow = ambiguous(driver, num_return_sequences=4)

    driver.run(max_steps=1_000_000)

    assert "--guide-step-timeout" in driver.failed[slow]
    driver.check_idle()


def test_a_request_can_be_cancelled_while_its_mask_is_computed(serve):
    driver = serve(step_timeout_s=1000.0, max_processes=1)
    slow = ambiguous(driver)
    while len(driver.output(slow)) < 25:
        driver.step()

    driver.engine.cancel("client", [slow])
    driver.run(max_steps=1_000_000)
    again = submit(driver, "ebnf_grammar", AMBIGUOUS, max_tokens=5)
    driver.run(max_steps=1_000_000)

    assert driver.reasons[slow, 0] is FinishReason.CANCELLED
    assert len(driver.output(again)) == 5
    driver.check_idle()


@pytest.mark.matrix(keep=0)
def test_guides_get_a_compiler_process_in_order_of_arrival(serve):
    driver = serve(step_timeout_s=1000.0, max_processes=1)
    requests = [submit(driver, kind) for kind in ("regex", "choice", "ebnf_grammar")]

    driver.run(max_steps=1_000_000)

    assert all(
        follows(kind, text_of(driver, request))
        for kind, request in zip(("regex", "choice", "ebnf_grammar"), requests, strict=True)
    )
    driver.check_idle()
