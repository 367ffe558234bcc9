"""Waiting limits and priority levels of a model, and a client's wishes within them."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference import InferRequest
from trimaran.server.queue_policy import QueuePolicy

LEVELS = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 5000000 }
  priority_queue_policy {
    key: 1
    value { default_timeout_microseconds: 2000000 allow_timeout_override: true }
  }
  priority_queue_policy {
    key: 3
    value { timeout_action: DELAY default_timeout_microseconds: 1000000 }
  }
}
"""


def _policy(config: str) -> QueuePolicy:
    return QueuePolicy(text_format.Parse(config, ModelConfig()))


def _request(**fields: int) -> InferRequest:
    return InferRequest(model_name="m", **fields)


def test_without_settings_neither_priority_nor_timeout_has_an_effect():
    policy = _policy("")
    assert policy.priority(_request(priority=5)) == 0
    assert policy.timeout_s(_request(timeout_us=1)) == 0


@pytest.mark.parametrize(("given", "level"), [(0, 2), (1, 1), (3, 3), (4, 2)])
def test_an_unknown_level_is_the_default_level(given, level):
    assert _policy(LEVELS).level(_request(priority=given)) == level


def test_the_engine_hears_a_higher_number_for_a_more_urgent_level():
    policy = _policy(LEVELS)
    assert policy.priority(_request(priority=1)) > policy.priority(_request(priority=3))


@pytest.mark.parametrize(
    ("fields", "timeout_s"),
    [
        ({}, 5.0),
        ({"timeout_us": 1000}, 5.0),
        ({"priority": 1}, 2.0),
        ({"priority": 1, "timeout_us": 1000}, 0.001),
        ({"priority": 1, "timeout_us": 9000000}, 2.0),
        ({"priority": 3}, 0.0),
    ],
)
def test_a_client_can_only_shorten_the_limit_and_only_where_allowed(fields, timeout_s):
    assert _policy(LEVELS).timeout_s(_request(**fields)) == timeout_s


# The placeholder of the template is the last field of its queue policy.
TIMEOUT = {"max_queue_size": "0 default_timeout_microseconds: 500000"}


async def test_a_request_without_a_token_in_time_is_rejected_and_cancelled(serve):
    async with serve(**TIMEOUT) as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        with pytest.raises(RequestError, match="Request timeout expired") as got:
            await served.infer("ensemble", text_input="x", max_tokens=9)
        assert got.value.kind is ErrorKind.UNAVAILABLE
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


async def test_a_request_that_runs_has_all_the_time_it_needs(serve):
    async with serve(**TIMEOUT) as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        task = asyncio.ensure_future(served.texts("ensemble", text_input="x", max_tokens=9))
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        await asyncio.sleep(0.7)
        engine.gate.set()
        assert await task == ["xa b c"]
