"""Beams at the token model and in the text models: whole outputs, best first."""

from __future__ import annotations

import asyncio
import copy
from array import array
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason, StepOutput
from trimaran.comm.messages.sampling_params import SamplingParams

PROMPT = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5}


def beams(*outputs, reasons=(), scores=None):
    """An engine's output for beams with these ids."""
    return {
        "beams": {
            "ids": [array("i", ids).tobytes() for ids in outputs],
            "cum_log_probs": [-2.0 - place for place in range(len(outputs))],
            "scores": scores or [-1.0 - place for place in range(len(outputs))],
            "reasons": [int(reason) for reason in reasons or [0] * len(outputs)],
            "log_probs": [[-0.5] * len(ids) for ids in outputs],
        }
    }


@asynccontextmanager
async def searching(serve, model, steps, **options):
    """The responses to a request whose engine sends these ``steps``, and the request's
    `Submit`."""
    values = options.pop("values", {})
    async with serve(**values) as served:
        engine = await served.dial(lambda submit: [0])
        engine.gate.clear()
        steps = steps(served) if callable(steps) else steps
        async with aclosing(served.stream(model, **options)) as stream:
            found = asyncio.ensure_future(_collect(stream))
            await engine.until(lambda: engine.submits or found.done())
            for number, extras in enumerate(steps):
                engine.send(
                    _said(engine.submits[0].request_id, extras, number == len(steps) - 1)
                )
                await served.processed(engine)
            yield await found, engine, served


async def _collect(stream):
    return [response async for response in stream]


def _said(request_id, extras, is_last):
    return StepOutput(
        step=1,
        request_ids=array("Q", [request_id]).tobytes(),
        sequence_indices=array("H", [0]).tobytes(),
        num_tokens=array("H", [0]).tobytes(),
        finish_reasons=bytes([FinishReason.LENGTH if is_last else 0]),
        token_ids=b"",
        extras={0: extras},
    )


def tensors(response):
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


ENDS = (FinishReason.END_ID, FinishReason.LENGTH)
STEPS = [beams([20], [21]), beams([21, 22, 23], [20, 24], reasons=ENDS)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("model", "inputs", "stream"),
    [
        ("tensorrt_llm", PROMPT, "streaming"),
        ("ensemble", {"text_input": "A", "max_tokens": 5}, "stream"),
    ],
)
async def test_each_beam_has_its_logits(serve, model, inputs, stream, is_stream):
    def logits(step, counts, values):
        step["beams"]["num_logits"] = counts
        rows = [np.full(4, value, np.float32).tobytes() for value in values]
        return {**step, "generation_logits": rows, "logits_dtype": "float32"}

    counts = ([1, 1], [1, 1]) if is_stream else ([0, 0], [3, 2])
    values = ([1, 2], [3, 4]) if is_stream else ([], [1, 2, 3, 4, 5])
    steps = [logits(*each) for each in zip(copy.deepcopy(STEPS), counts, values, strict=True)]
    async with searching(
        serve, model, steps, **inputs, beam_width=2, return_generation_logits=True,
        **{stream: is_stream},
    ) as (responses, _, _):  # fmt: skip
        found = [
            tensor.data
            for response in responses
            for tensor in response.outputs
            if tensor.name == "generation_logits"
        ]
    if is_stream:
        assert [each.shape for each in found] == [(1, 1, 2, 4)] * 2
        assert [each[..., 0].tolist() for each in found] == [[[[1, 2]]], [[[3, 4]]]]
    else:
        assert [each.shape for each in found] == [(1, 2, 3, 4)]
        assert found[0][..., 0].tolist() == [[[1, 2, 3], [4, 5, 0]]]


@pytest.mark.feature("input:beam_width")
async def test_beams_are_rows_of_one_response(serve):
    async with searching(
        serve, "tensorrt_llm", STEPS, **PROMPT, beam_width=2, return_log_probs=True,
        return_finish_reason=True, return_num_output_tokens=True,
    ) as (responses, engine, served):  # fmt: skip
        (response,) = responses
        found = tensors(response)
        assert found["output_ids"] == [[[7, 8, 9, 21, 22, 23], [7, 8, 9, 20, 24, -1]]]
        assert found["sequence_length"] == [[6, 5]]
        assert found["cum_log_probs"] == [[-1.0, -2.0]]
        assert found["output_log_probs"] == [[[-0.5, -0.5, -0.5], [-0.5, -0.5, -1.0]]]
        assert found["finish_reason"] == [[b"stop", b"length"]]
        assert found["num_output_tokens"] == [[5]]
        assert "sequence_index" not in found
        assert response.is_final
        sampling = SamplingParams.from_wire(engine.submits[0].sampling)
        assert (sampling.beam_width, sampling.num_return_sequences) == (2, 2)
        labels = '{model="tensorrt_llm",version="1"}'
        text = served.metrics.render().decode()
        assert f"trimaran_time_to_first_token_seconds_count{labels} 1" in text
        assert [
            line.split()[-1] for line in text.splitlines() if "output_token_len_sum" in line
        ] == ["5"]


@pytest.mark.feature("parameter:normalize_log_probs")
async def test_log_probabilities_of_beams_may_be_sums(serve):
    async with searching(
        serve, "tensorrt_llm", STEPS, values={"normalize_log_probs": "false"}, **PROMPT,
        beam_width=2, return_log_probs=True,
    ) as (responses, *_):  # fmt: skip
        assert tensors(responses[0])["cum_log_probs"] == [[-2.0, -3.0]]


async def test_a_stream_has_whole_beams_in_every_response(serve):
    async with searching(
        serve, "tensorrt_llm", STEPS, **PROMPT, beam_width=2, streaming=True
    ) as (responses, *_):
        assert [tensors(r)["output_ids"] for r in responses] == [
            [[[20], [21]]],
            [[[21, 22, 23], [20, 24, -1]]],
        ]
        assert [r.is_final for r in responses] == [False, True]


async def test_fewer_beams_than_were_searched_may_be_returned(serve):
    async with searching(
        serve, "tensorrt_llm", STEPS, **PROMPT, beam_width=4, num_return_sequences=2
    ) as (_, engine, _):
        assert len(engine.submits) == 1
        assert engine.submits[0].sampling["num_return_sequences"] == 2


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("is_streaming", [False, True])
async def test_each_beam_has_its_text(serve, model, is_streaming):
    def steps(served):
        encode = served.tokenizer.encode_now
        ids = [encode(" red wine", False), encode(" blue cheese", False)]
        return [beams(ids[1][:1], ids[0][:1]), beams(*ids)]

    async with searching(
        serve, model, steps, text_input="Some", max_tokens=9, beam_width=2,
        stream=is_streaming, stop_words=["lue"], return_log_probs=True,
        return_finish_reason=True,
    ) as (responses, *_):  # fmt: skip
        last = tensors(responses[-1])
        start = b"" if is_streaming else b"Some"
        assert last["text_output"] == [start + b" red wine", start + b" blue"]
        assert last["cum_log_probs"] == [[-1.0, -2.0]]
        assert last["finish_reason"] == [[b"length", b"stop"]]
        assert len(responses) == 1 + is_streaming
        assert responses[-1].is_final


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_stopped_search_answers_with_the_best_so_far(serve, is_streaming):
    async with serve() as served:
        engine = await served.dial(lambda submit: [0])
        engine.gate.clear()
        options = {**PROMPT, "beam_width": 2, "return_finish_reason": True, "id": "s"}
        async with aclosing(
            served.stream("tensorrt_llm", **options, streaming=is_streaming)
        ) as stream:
            found = asyncio.ensure_future(_collect(stream))
            await engine.until(lambda: engine.submits)
            extras = beams([20], [21], reasons=(FinishReason.END_ID, 0))
            engine.send(_said(engine.submits[0].request_id, extras, is_last=False))
            await served.processed(engine)
            await served.infer("tensorrt_llm", **PROMPT, stop=True, id="s")
            responses = await found
        last = tensors(responses[-1])
        assert last["output_ids"] == (
            [[[20], [21]]] if is_streaming else [[[7, 8, 9, 20], [7, 8, 9, 21]]]
        )
        assert len(responses) == 1 + is_streaming
        assert last["finish_reason"] == [[b"stop", b"cancelled"]]


async def test_unread_beams_are_sent_after_a_stop(serve):
    async with serve() as served:
        engine = await served.dial(lambda submit: [0])
        engine.gate.clear()
        options = {**PROMPT, "beam_width": 2, "id": "s", "streaming": True}
        async with aclosing(served.stream("tensorrt_llm", **options)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await engine.until(lambda: engine.submits)
            for extras in (beams([20], [21]), beams([20, 22], [21, 23])):
                engine.send(_said(engine.submits[0].request_id, extras, is_last=False))
                await served.processed(engine)
                await first
            await served.infer("tensorrt_llm", **PROMPT, stop=True, id="s")
            responses = await _collect(stream)
        assert tensors(responses[-1])["output_ids"] == [[[20, 22], [21, 23]]]
        assert responses[-1].is_final


async def test_a_batch_has_one_beam_width(serve):
    async with serve() as served:
        await served.dial(lambda submit: [0])
        with pytest.raises(
            RequestError, match="beam_width is 3 in one sample and 2 in another"
        ):
            await served.infer(
                "tensorrt_llm",
                input_ids=np.array([[1], [2]], np.int32),
                input_lengths=np.array([[1], [1]], np.int32),
                request_output_len=np.array([[4], [4]], np.int32),
                beam_width=np.array([[2], [3]], np.int32),
            )


@pytest.mark.parametrize("is_streaming", [False, True])
async def test_a_replayed_beam_search_repeats_no_response(serve, is_streaming):
    row = np.full(600, 1.0, "float32").tobytes()
    prompt = {"logits_dtype": "float32", "context_logits": [row] * 3}
    told = [
        {**beams([20], [21]), **prompt},
        beams([20, 22], [20, 23]),
        beams([20, 22, 24], [20, 23, 25]),
        beams([20, 22, 24, 26], [20, 23, 25, 27]),
    ]
    async with serve() as served:
        engine = await served.dial(lambda submit: [0])
        engine.gate.clear()
        options = {**PROMPT, "beam_width": 2, "return_context_logits": True}
        async with aclosing(
            served.stream("tensorrt_llm", **options, streaming=is_streaming)
        ) as stream:
            found = asyncio.ensure_future(_collect(stream))
            await engine.until(lambda: engine.submits)
            for extras in told[:2]:
                engine.send(_said(engine.submits[0].request_id, extras, is_last=False))
                await served.processed(engine)
            await engine.end()
            await engine.until(lambda: not served.models["tensorrt_llm"].is_ready)
            again = await served.dial(lambda submit: [0], incarnation=1)
            again.gate.clear()
            await again.until(lambda: again.submits)
            for number, extras in enumerate(told):
                again.send(_said(again.submits[0].request_id, extras, is_last=number == 3))
                await served.processed(again)
            responses = [tensors(response) for response in await found]
    lengths = [r["sequence_length"][0] for r in responses]
    assert lengths == ([[1, 1], [2, 2], [3, 3], [4, 4]] if is_streaming else [[7, 7]])
    assert {np.shape(r["context_logits"]) for r in responses} == {(1, 3, 600)}
