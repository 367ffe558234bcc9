"""Waiting limits and priority levels of a model, and a client's wishes within them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from tests.unit.server.models.test_draft_rounds import two_models
from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.queue_policy import QueuePolicy
from trimaran.server.inference.request import InferRequest, Tensor

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


def test_without_a_queue_policy_priority_and_timeout_have_no_effect():
    policy = _policy("")
    assert policy.priority(_request(priority=5)) == 0
    assert policy.timeout_s(_request(timeout_us=1)) == 0


@pytest.mark.parametrize(("given", "level"), [(0, 2), (1, 1), (3, 3), (4, 2)])
def test_an_unknown_level_is_the_default_level(given, level):
    assert _policy(LEVELS).level(_request(priority=given)) == level


def test_a_more_urgent_level_is_a_higher_priority_at_the_engine():
    policy = _policy(LEVELS)
    assert policy.priority(_request(priority=1)) > policy.priority(_request(priority=3))


@pytest.mark.feature("parameter:timeout", of="request")
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
def test_a_client_can_only_shorten_the_queue_timeout_and_only_if_allowed(fields, timeout_s):
    assert _policy(LEVELS).timeout_s(_request(**fields)) == timeout_s


@pytest.mark.feature("parameter:priority", of="request")
async def test_the_priority_of_a_request_reaches_the_engine(serve):
    levels = {"max_queue_size": "0 } priority_levels: 3 default_priority_level: 2 #"}
    async with serve(**levels) as served:
        engine = await served.dial(served.answer("a"))
        config = served.models["tensorrt_llm"].config
        for level in (0, 1, 3):
            ids = {"input_ids": [[1]], "input_lengths": [[1]], "request_output_len": [[1]]}
            inputs = {
                name: Tensor(name, "INT32", np.array(v, np.int32)) for name, v in ids.items()
            }
            request = InferRequest(model_name=config.name, inputs=inputs, priority=level)
            async for _ in served.models["tensorrt_llm"].infer(request):
                pass
    assert [submit.priority for submit in engine.submits] == [-2, -1, -3]


# The placeholder of the template is the last field of its queue policy.
TIMEOUT = {"max_queue_size": "0 default_timeout_microseconds: 500000"}


async def test_a_request_without_a_token_in_time_is_rejected_and_cancelled(serve):
    async with serve(**TIMEOUT) as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        with pytest.raises(RequestError, match="Request timeout expired") as got:
            await served.infer("ensemble", text_input="x", max_tokens=9)
        assert got.value.kind is ErrorKind.UNAVAILABLE
        await engine.until(lambda: len(engine.submits) == len(engine.cancelled) == 1)
        assert engine.cancelled == [engine.submits[0].request_id]


DELAY = {"max_queue_delay_microseconds": "300000"}
HOUR = {"max_queue_delay_microseconds": "3600000000"}
SHORT = {"model": "ensemble", "text_input": "x", "max_tokens": 2}


@pytest.mark.feature("setting:max_queue_delay_microseconds", of="request")
async def test_requests_within_the_queue_delay_go_to_the_engine_together(serve):
    async with serve(**HOUR) as served:
        engine = await served.dial(served.answer("a b c"))
        waiting = [asyncio.ensure_future(served.texts(**SHORT)) for _ in range(2)]
        dropped = asyncio.ensure_future(served.texts(**SHORT))
        await asyncio.sleep(0.1)
        assert engine.submits == []
        dropped.cancel()
        # A preferred batch size of requests does not wait.
        await asyncio.gather(*waiting, served.texts(**SHORT))
        assert len(engine.submits) == 3


async def test_a_batch_is_sent_when_the_queue_delay_has_passed(serve):
    async with serve(**DELAY) as served:
        engine = await served.dial(served.answer("a b c"))
        assert len(await asyncio.gather(*(served.texts(**SHORT) for _ in range(2)))) == 2
        assert len(engine.submits) == 2


async def test_the_queue_delay_applies_to_the_first_of_a_requests_rounds_alone(serve, tmp_path):
    async with two_models(serve, tmp_path, fill=HOUR) as (served, target, draft):
        asked = {"text_input": "A house", "num_draft_tokens": 2}
        # The first rounds of four requests are a batch; one request ends with its first round.
        texts = await asyncio.gather(
            *(
                served.texts("tensorrt_llm_bls", **asked, max_tokens=count)
                for count in (3, 9, 9, 9)
            )
        )

    assert [len(submits) for submits in (target.submits, draft.submits)] == [10, 10]
    assert texts[1:] == texts[1:2] * 3


async def test_a_request_stopped_within_the_queue_delay_ends_without_a_token(serve):
    async with serve(**HOUR) as served:
        await served.dial(lambda submit: [5, 6])
        ids = {"input_ids": [1], "input_lengths": 1, "request_output_len": 2}
        task = asyncio.ensure_future(served.infer("tensorrt_llm", id="a", **ids))
        await asyncio.sleep(0.05)
        await served.infer("tensorrt_llm", id="a", stop=True, **ids)
        # These requests complete a preferred batch size.
        others = [served.infer("tensorrt_llm", **ids) for _ in range(3)]
        await asyncio.gather(*others)
        (response,) = await task
        assert response.outputs[0].data.tolist() == [[[1]]]


async def test_the_queue_timeout_does_not_apply_to_running_requests(serve):
    timeout = {"max_queue_size": "0 default_timeout_microseconds: 2000000"}
    async with serve(**timeout) as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        task = asyncio.ensure_future(served.texts("ensemble", text_input="x", max_tokens=9))
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        await asyncio.sleep(2.2)
        engine.gate.set()
        assert await task == ["xa b c"]
