"""Stop requests to the text models themselves."""

import asyncio
import threading

import pytest

from tests.unit.server.models.conftest import text_of
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import Stop
from trimaran.server.models.token_model import TokenModel
from trimaran.server.models.tokenizer import Tokenizer

STOP = {"text_input": "", "max_tokens": 0, "stop": True}


@pytest.mark.feature("input:stop", of="text")
@pytest.mark.parametrize("decoupled", ["True", "False"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_text_model_stops_the_requests_of_an_id(serve, model, decoupled):
    async with serve(decoupled_mode=decoupled) as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        stopped, kept = (
            asyncio.ensure_future(served.texts(model, id=name, text_input="x", max_tokens=99))
            for name in "ab"
        )
        await engine.until(lambda: len(engine.submits) == 2)
        engine.step()
        await served.processed(engine)
        answers = await served.infer(model, id="a", **STOP)
        assert [(a.id, a.outputs, a.is_final) for a in answers] == [("a", [], True)]
        (text,) = await stopped
        assert "xone two three".startswith(text)
        assert not kept.done()
        engine.gate.set()
        assert await kept == ["xone two three four"]
        with pytest.raises(RequestError, match="request ID is not provided"):
            await served.infer(model, **STOP)


@pytest.mark.parametrize("through", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_stop_reaches_a_request_during_tokenization(serve, monkeypatch, model, through):
    # In a thread, like for a long prompt, whose result arrives after the stop.
    monkeypatch.setattr("trimaran.server.models.tokenizer._INLINE_CHARACTERS", 0)
    async with serve() as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        request = asyncio.ensure_future(
            served.texts(model, id="a", text_input="x", max_tokens=99)
        )
        await asyncio.sleep(0)
        assert not engine.submits
        inputs = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
        await served.infer(through, id="a", **(inputs if through == "tensorrt_llm" else STOP))
        assert await request == ["x"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
async def test_a_stop_reaches_a_request_whose_tensors_are_read_in_a_thread(
    serve, monkeypatch, model
):
    monkeypatch.setattr("trimaran.server.models.token_model._LARGE_BYTES", 0)
    reading, go_on, read = threading.Event(), threading.Event(), TokenModel._samples

    def late(*arguments):
        reading.set()
        assert go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(TokenModel, "_samples", late)
    ids = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 99}
    async with serve() as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        asked = ids if model == "tensorrt_llm" else {"text_input": "x", "max_tokens": 99}
        request = asyncio.ensure_future(served.infer(model, id="a", **asked))
        assert await asyncio.to_thread(reading.wait, 60)
        stop = {**ids, "stop": True} if model == "tensorrt_llm" else STOP
        await served.infer(model, id="a", **stop)
        go_on.set()
        (response,) = await asyncio.wait_for(request, 60)
        if model == "ensemble":
            assert text_of(response) == "x"
        else:
            assert response.outputs[0].data.reshape(-1).tolist() == [5, 6]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_stop_at_another_front_end_reaches_a_request_during_tokenization(
    serve, monkeypatch, model
):
    begun, go_on, encode = [], asyncio.Event(), Tokenizer.encode

    async def late(*arguments):
        begun.append(arguments)
        await go_on.wait()
        return await encode(*arguments)

    monkeypatch.setattr(Tokenizer, "encode", late)
    async with serve() as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        stopped, kept = (
            asyncio.ensure_future(served.texts(model, id=name, text_input="x", max_tokens=99))
            for name in "ab"
        )
        await engine.until(lambda: len(begun) == 2)
        # An engine's answer to a stop.
        engine.send(Stop(client_request_id="a"))
        await served.processed(engine)
        assert not engine.submits
        go_on.set()
        assert await stopped == ["x"]
        engine.gate.set()
        assert await kept == ["xone two three four"]


@pytest.mark.parametrize("is_requested", [False, True])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_stopped_stream_has_a_finish_reason_if_requested(serve, model, is_requested):
    async with serve() as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        options = {"text_input": "x", "max_tokens": 99, "return_finish_reason": is_requested}
        stream = served.stream(model, id="a", stream=True, **options)
        first = asyncio.ensure_future(anext(stream))
        await engine.until(lambda: len(engine.submits) == 1)
        for _ in range(20):
            engine.step()
            await served.processed(engine)
            if first.done():
                break
        await first
        await served.infer(model, id="a", **STOP)
        rest = [response async for response in stream]
        ends = rest[-1].outputs if rest else []
        reasons = [t.data.tolist() for t in ends if t.name == "finish_reason"]
        assert reasons == ([[[b"cancelled"]]] if is_requested else [])
