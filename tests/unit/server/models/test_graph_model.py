"""Ensembles with steps or wirings other than text in and text out."""

from __future__ import annotations

import logging
import shutil
import time
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from trimaran.comm.errors import ConfigError, EngineDeadError, RequestError
from trimaran.server.inference.request import InferRequest, Tensor

IDS_OUT = """
platform: "ensemble" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: 1 }
input { name: "length" data_type: TYPE_INT32 dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
output { name: "prompt" data_type: TYPE_INT32 dims: -1 }
ensemble_scheduling {
  step {
    model_name: "tensorrt_llm" model_version: -1
    input_map { key: "input_ids" value: "prompt" }
    input_map { key: "input_lengths" value: "_length" }
    input_map { key: "request_output_len" value: "_output_length" }
    input_map { key: "streaming" value: "stream" }
    output_map { key: "output_ids" value: "ids" }
  }
  step {
    model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "length" }
    output_map { key: "INPUT_ID" value: "prompt" }
    output_map { key: "REQUEST_INPUT_LEN" value: "_length" }
    output_map { key: "REQUEST_OUTPUT_LEN" value: "_output_length" }
  }
}
"""
ROUND_TRIP = """
platform: "ensemble" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: 1 }
input { name: "length" data_type: TYPE_INT32 dims: 1 }
output { name: "back" data_type: TYPE_STRING dims: -1 }
ensemble_scheduling {
  step {
    model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "length" }
    output_map { key: "INPUT_ID" value: "ids" }
    output_map { key: "REQUEST_INPUT_LEN" value: "num_ids" }
  }
  step {
    model_name: "postprocessing" model_version: -1
    input_map { key: "TOKENS_BATCH" value: "ids" }
    input_map { key: "SEQUENCE_LENGTH" value: "num_ids" }
    output_map { key: "OUTPUT" value: "back" }
  }
}
"""
OUTER = """
platform: "ensemble" max_batch_size: 4
input { name: "q" data_type: TYPE_STRING dims: 1 }
input { name: "n" data_type: TYPE_INT32 dims: 1 }
input { name: "s" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "a" data_type: TYPE_STRING dims: -1 }
ensemble_scheduling {
  step {
    model_name: "ensemble" model_version: -1
    input_map { key: "text_input" value: "q" }
    input_map { key: "max_tokens" value: "n" }
    input_map { key: "stream" value: "s" }
    output_map { key: "text_output" value: "a" }
  }
}
"""
PASS_ON = """
platform: "ensemble" max_batch_size: 4
input { name: "q" data_type: TYPE_STRING dims: 1 }
output { name: "a" data_type: TYPE_STRING dims: -1 }
ensemble_scheduling {
  step {
    model_name: "STEP" model_version: -1
    input_map { key: "q" value: "q" }
    output_map { key: "a" value: "a" }
  }
}
"""
CIRCLE = """
platform: "ensemble" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: 1 }
input { name: "length" data_type: TYPE_INT32 dims: 1 }
output { name: "ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
ensemble_scheduling {
  step {
    model_name: "preprocessing" model_version: -1
    input_map { key: "QUERY" value: "text" }
    input_map { key: "REQUEST_OUTPUT_LEN" value: "num_ids" }
    output_map { key: "INPUT_ID" value: "prompt" }
  }
  step {
    model_name: "tensorrt_llm" model_version: -1
    input_map { key: "input_ids" value: "prompt" }
    input_map { key: "input_lengths" value: "length" }
    input_map { key: "request_output_len" value: "length" }
    output_map { key: "output_ids" value: "ids" }
    output_map { key: "sequence_length" value: "num_ids" }
  }
}
"""


@pytest.fixture
def serve_with(serve, tmp_path):
    """Like ``serve``, with further models by name."""

    @asynccontextmanager
    async def start(**configs):
        async with serve():
            pass
        for name, config in configs.items():
            (tmp_path / "models" / name / "1").mkdir(parents=True)
            (tmp_path / "models" / name / "config.pbtxt").write_text(config)
        shutil.move(tmp_path / "models", tmp_path / "again")
        async with serve(repository=tmp_path / "again") as served:
            yield served

    return start


async def test_steps_run_in_the_order_of_their_tensors(serve_with, caplog):
    caplog.set_level(logging.INFO)
    async with serve_with(ids_out=IDS_OUT) as served:
        await served.dial(lambda submit: [5, 6, 7])
        (response,) = await served.infer("ids_out", text="hello", length=3)
        prompt = served.tokenizer.encode_now("hello", True)
        values = {tensor.name: tensor.data.tolist() for tensor in response.outputs}
        assert values == {"ids": [[[*prompt, 5, 6, 7]]], "prompt": [prompt]}
        assert response.parameters["sequence_start"] is False
        assert "Model 'ids_out': ensemble, run step by step" in caplog.messages


async def test_each_response_of_a_step_is_a_response_of_the_ensemble(serve_with):
    async with serve_with(ids_out=IDS_OUT) as served:
        assert served.models["ids_out"].is_decoupled
        await served.dial(lambda submit: [5, 6, 7])
        responses = await served.infer(
            "ids_out", text="hello", length=3, stream=True, outputs=("ids",)
        )
        assert [[t.data.tolist() for t in r.outputs] for r in responses] == [
            [[[[i]]]] for i in (5, 6, 7)
        ]


@pytest.mark.parametrize(
    ("model", "text", "length"),
    [("ids_out", "text", "length"), ("ensemble", "text_input", "max_tokens")],
)
async def test_the_time_of_a_step_starts_at_its_request(serve_with, model, text, length):
    minute_ns = 60 * 10**9
    async with serve_with(ids_out=IDS_OUT) as served:
        await served.dial(lambda submit: [5])
        inputs = {
            text: Tensor(text, "BYTES", np.array([[b"hello"]], object)),
            length: Tensor(length, "INT32", np.ones((1, 1), np.int32)),
        }
        arrival_ns = time.monotonic_ns() - minute_ns
        request = InferRequest(model_name=model, inputs=inputs, arrival_ns=arrival_ns)
        async with aclosing(served.models[model].infer(request)) as responses:
            assert len([response async for response in responses]) == 1
        took_ns = {
            name: served.models[name].statistics.message().inference_stats.success.ns
            for name in (model, "preprocessing", "tensorrt_llm")
        }
        assert took_ns[model] >= minute_ns
        assert 0 < took_ns["preprocessing"] < minute_ns
        assert 0 < took_ns["tensorrt_llm"] < minute_ns


@pytest.mark.parametrize(
    ("model", "text", "length"),
    [("ids_out", "text", "length"), ("ensemble", "text_input", "max_tokens")],
)
async def test_each_phase_of_an_ensemble_contains_the_phases_of_its_steps(
    serve_with, model, text, length
):
    async with serve_with(ids_out=IDS_OUT) as served:
        await served.dial(lambda submit: [5])
        for _ in range(20):
            await served.infer(model, **{text: "hello", length: 1})
        steps = {"preprocessing", "tensorrt_llm", "postprocessing"}
        durations = {
            name: served.models[name].statistics.durations_ns() for name in (model, *steps)
        }
        of_model = durations.pop(model)
        for phase, duration in of_model.items():
            assert duration >= sum(each[phase] for each in durations.values()), phase


async def test_closing_an_ensemble_cancels_its_step(serve_with):
    async with serve_with(ids_out=IDS_OUT) as served:
        engine = await served.dial(lambda submit: [5] * 100)
        async with aclosing(
            served.stream("ids_out", text="hello", length=100, stream=True)
        ) as responses:
            await anext(responses)
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


async def test_steps_without_an_engine_answer_without_an_engine(serve_with):
    async with serve_with(round_trip=ROUND_TRIP) as served:
        model = served.models["round_trip"]
        assert model.is_ready
        assert not model.is_decoupled
        texts = np.array([["größer 東京".encode()], [b"b"]], dtype=object)
        (response,) = await served.infer(
            "round_trip", text=texts, length=np.ones((2, 1), np.int32)
        )
        assert response.is_final
        assert response.outputs[0].data.tolist() == texts.reshape(-1).tolist()


async def test_errors_of_a_nested_ensemble_name_both_ensembles(serve_with):
    async with serve_with(outer=OUTER) as served:
        with pytest.raises(
            EngineDeadError, match="in ensemble 'outer', in ensemble 'ensemble', "
        ):
            await served.infer("outer", q="x", n=9)
        await served.dial(served.answer("größer than 東京"))
        deltas = [
            r.outputs[0].data.item().decode()
            for r in await served.infer("outer", q="x", n=99, s=True)
        ]
        assert "".join(deltas) == "größer than 東京"
        assert len(deltas) > 3
        with pytest.raises(
            RequestError, match="in ensemble 'outer', in ensemble 'ensemble', 'ma"
        ):
            await served.infer("outer", q="x", n=0)


async def test_an_ensemble_as_its_own_step_is_refused(serve_with):
    first = PASS_ON.replace("STEP", "second")
    second = PASS_ON.replace("STEP", "first")
    with pytest.raises(ConfigError, match="the ensemble 'first' is a step of itself"):
        async with serve_with(first=first, second=second):
            pass


async def test_cyclic_steps_are_refused(serve_with):
    with pytest.raises(
        ConfigError, match="'preprocessing', 'tensorrt_llm' wait for each other"
    ):
        async with serve_with(circle=CIRCLE):
            pass
