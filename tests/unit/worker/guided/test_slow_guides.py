"""Slowly compiling guides: their requests fail at the limit, and other requests continue."""

from __future__ import annotations

import json

import pytest

from tests.unit.worker.guided_engine import (
    follows,
    make_engine,
    slow_schema,
    submit,
    text_of,
    texts,
)
from trimaran.comm.errors import ConfigError
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import GuidedConfig


@pytest.fixture(scope="module")
def serve():
    """A function that makes a driver with this guide timeout."""
    drivers = []

    def make(timeout_s):
        guided = GuidedConfig(backend="xgrammar", timeout_s=timeout_s)
        drivers.append(make_engine(guided=guided))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.shutdown()


@pytest.fixture(scope="module")
def driver(serve):
    """A driver with a very long time limit for guides."""
    return serve(250.0)


def test_a_guide_does_not_wait_for_slow_guides_cancelled_or_not(driver):
    quick = [submit(driver, "regex")]
    driver.run()
    slow = [submit(driver, "json_schema", slow_schema(number)) for number in range(3)]
    gone = submit(driver, "json_schema", slow_schema(3))
    driver.engine.cancel("client", [gone])
    quick += [submit(driver, "choice"), submit(driver, "regex", "[a-f]{3}")]
    while not all((request, 0) in driver.reasons for request in quick):
        driver.step()
    compiled = [request for request in slow if (request, 0) in driver.reasons]

    driver.engine.cancel("client", slow)
    driver.run()
    after = submit(driver, "ebnf_grammar")
    driver.run()

    assert not compiled
    assert follows("choice", text_of(driver, quick[1]))
    assert follows("ebnf_grammar", text_of(driver, after))
    assert all(driver.reasons[request, 0] is FinishReason.CANCELLED for request in slow)
    driver.check_idle()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_a_guide_over_the_time_limit_is_refused_with_the_limit(serve, seconds):
    driver = serve(seconds)
    good = submit(driver, "regex")
    bad = submit(driver, "json_schema", slow_schema(0))

    driver.run(max_steps=100_000)

    assert f"takes more than {seconds} s to be compiled" in driver.failed[bad]
    assert "--guide-timeout" in driver.failed[bad]
    assert follows("regex", text_of(driver, good))
    driver.check_idle()


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("timeout_s", "--guide-timeout"),
        ("step_timeout_s", "--guide-step-timeout"),
        ("max_processes", "--guide-processes"),
    ],
)
def test_zero_time_and_zero_processes_for_guides_are_refused_at_the_start(field, flag):
    with pytest.raises(ConfigError, match=f"{flag} is 0"):
        GuidedConfig(backend="xgrammar", **{field: 0})


@pytest.mark.matrix(keep=0)
def test_a_slow_guide_within_the_limit_is_followed(driver):
    guide = texts(4000)
    request = submit(driver, "choice", guide)

    driver.run(max_steps=1_000_000)

    assert text_of(driver, request) in json.loads(guide)
