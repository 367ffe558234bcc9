"""Plain streams take the short way, and get what the long way gives."""

import asyncio
import json
import re
import shutil
from contextlib import aclosing

import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import RequestFailed
from trimaran.comm.messages.token_ids import unpack_ids
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.inference.validation import Validator
from trimaran.server.protocol.generate import GenerateEncoder, GenerateMapper

BOTH = pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls"])
WHAT = {"text_input": "A house", "max_tokens": 20, "stream": True}
PLAIN = [
    WHAT,
    {**WHAT, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "random_seed": 3},
    {**WHAT, "end_id": 5, "pad_id": 7, "min_length": 3, "stop_words": ""},
    {**WHAT, "exclude_input_in_output": False, "return_log_probs": False},
    {**WHAT, "text_input": "größer 東京 🙂", "id": "a1", "max_tokens": 1},
]
LONG = [
    {**WHAT, "stream": False},
    {**WHAT, "stop_words": ["halt"]},
    {**WHAT, "return_log_probs": True},
    {**WHAT, "return_num_input_tokens": True},
    {**WHAT, "return_finish_reason": True},
    {**WHAT, "num_return_sequences": 2},
    {**WHAT, "beam_width": 2},
    {**WHAT, "stop": True},
    {**WHAT, "text_input": "a " * 2000},
    {**WHAT, "max_tokens": 0},
]


class Ways:
    """Both ways of one text model's streams."""

    def __init__(self, served, name):
        self.model = served.models[name]
        self.direct = DirectText.of(self.model)
        self._mapper = GenerateMapper(self.model.config, 1 << 20)

    def request(self, document):
        """The request of a body's inputs, under the body's id."""
        inputs = {name: value for name, value in document.items() if name != "id"}
        request, wires = self._mapper.parse(json.dumps(inputs).encode())
        request.id = document.get("id", "")
        request.inputs = Validator(self.model.config).check(wires, (), request.id)
        return request

    def plain(self, document):
        """The plain stream of a body; None if the short way does not take it."""
        return self.direct.reader.of_tensors(self.request(document), is_streaming=True)

    def short(self, document):
        """The responses of the short way."""
        return self.direct.stream(self.model, self.plain(document))

    def long(self, document):
        """The responses of the long way."""
        return self.model.infer(self.request(document))

    def each(self):
        """Both ways."""
        return self.short, self.long


def _shown(response):
    """What a client sees of a response."""
    event = GenerateEncoder().encode_short(response)
    shapes = [(output.name, output.datatype, output.shape) for output in response.outputs]
    return event, shapes, response.is_final


def _asked(submit):
    return (
        unpack_ids(submit.prompt_ids).tolist(), submit.sampling, submit.cache_salt,
        submit.priority, submit.streaming, submit.client_request_id,
    )  # fmt: skip


def _counts(served):
    lines = served.metrics.render().decode().splitlines()
    names = "request_success|request_failure|count|exec_count"
    return [line for line in lines if re.match(rf"nv_inference_({names})\{{", line)]


async def _by_step(engine, responses):
    """The responses of a stream whose engine makes each step after the response before it."""
    engine.gate.clear()
    del engine.submits[:]
    found = []
    next_one = asyncio.ensure_future(anext(responses, None))
    await engine.until(lambda: engine.submits)
    while engine.num_live:
        engine.step()
        response = await next_one
        next_one = asyncio.ensure_future(anext(responses, None))
        if response is not None:
            found.append(_shown(response))
    last = await next_one
    return found if last is None else [*found, _shown(last)]


@BOTH
async def test_a_plain_stream_gets_the_long_ways_responses(serve, name):
    async with serve() as served:
        engine = await served.dial(served.answer(" is long and plain </s>"))
        ways = Ways(served, name)
        for document in PLAIN:
            found, asked = [], []
            for way in ways.each():
                async with aclosing(way(document)) as responses:
                    found.append(await _by_step(engine, responses))
                asked.append(_asked(engine.submits[0]))
            assert found[0] == found[1], document
            assert asked[0] == asked[1], document
            assert [is_final for *_, is_final in found[0]] == [
                *[False] * (len(found[0]) - 1), True,
            ]  # fmt: skip


@BOTH
async def test_characters_of_several_tokens_come_whole_and_late_tokens_together(serve, name):
    text = " größer 東京 🙂 done"
    async with serve() as served:
        await served.dial(served.answer(text), max_per_step=3)
        ways = Ways(served, name)
        for way in ways.each():
            async with aclosing(way({**WHAT, "max_tokens": 64})) as responses:
                parts = [one.outputs[0].data.item().decode() async for one in responses]
            assert "".join(parts) == text
            assert "\ufffd" not in "".join(parts)


@BOTH
async def test_streams_of_other_forms_and_wrong_ones_take_the_long_way(serve, name):
    async with serve() as served:
        await served.dial(served.answer("a"))
        ways = Ways(served, name)
        assert [ways.plain(document) for document in LONG] == [None] * len(LONG)


@pytest.mark.parametrize("keys", [{"decoupled_mode": "False"}, {"accumulate_tokens": "True"}])
async def test_models_that_answer_otherwise_have_no_plain_streams(serve, keys):
    async with serve(**keys) as served:
        await served.dial(served.answer("a"))
        assert Ways(served, "tensorrt_llm_bls").plain(WHAT) is None


@BOTH
async def test_every_step_counts_a_plain_stream_as_on_the_long_way(serve, name):
    found = []
    for way in ("short", "long"):
        async with serve() as served:
            await served.dial(served.answer("a b"))
            async with aclosing(getattr(Ways(served, name), way)(WHAT)) as responses:
                async for _ in responses:
                    pass
            found.append(_counts(served))
            await served.models[name].wait_idle()
        # The next server writes its repository into the same folder.
        shutil.rmtree(served.config.model_repository)
    assert found[0] == found[1]
    assert sum(line.endswith(("} 1.0", "} 1")) for line in found[0]) == 12


async def test_closing_a_plain_stream_ends_the_request_at_the_engine(serve):
    found = []
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        for way in Ways(served, "ensemble").each():
            del engine.submits[:], engine.cancelled[:]
            async with aclosing(way(WHAT)) as responses:
                task = asyncio.ensure_future(anext(responses))
                await engine.until(lambda: engine.submits)
                engine.step()
                await task
            await engine.until(lambda: engine.cancelled)
            assert engine.cancelled == [engine.submits[0].request_id]
            found.append([line for line in _counts(served) if 'reason="CANCELED"' in line])
    assert [sum(line.endswith(("} 2.0", "} 2")) for line in lines) for lines in found] == [0, 2]


@BOTH
@pytest.mark.parametrize("num_steps", [0, 2])
async def test_a_stop_request_ends_a_plain_stream(serve, name, num_steps):
    found = []
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        for way in Ways(served, name).each():
            del engine.submits[:]
            responses, seen = way({**WHAT, "id": "s1"}), []
            task = asyncio.ensure_future(anext(responses, None))
            await engine.until(lambda: engine.submits)
            for _ in range(num_steps):
                engine.step()
                seen.append(_shown(await task))
                task = asyncio.ensure_future(anext(responses, None))
            await served.infer(name, id="s1", text_input="x", max_tokens=1, stop=True)
            last = await task
            found.append([*seen, last and _shown(last)])
            await responses.aclose()
    assert found[0] == found[1]
    assert len(found[0]) == num_steps + 1


@BOTH
async def test_failures_of_a_plain_stream_are_those_of_the_long_way(serve, name):
    errors = []
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        for way in Ways(served, name).each():
            del engine.submits[:]
            responses = way(WHAT)
            task = asyncio.ensure_future(anext(responses))
            await engine.until(lambda: engine.submits)
            engine.step()
            await task
            request_id = engine.submits[0].request_id
            engine.send(RequestFailed(request_id=request_id, kind="INTERNAL", text="broken"))
            with pytest.raises(RequestError) as found:
                await anext(responses)
            errors.append((str(found.value), found.value.kind))
    assert errors[0] == errors[1]
    assert errors[0][0].endswith("broken")
    assert errors[0][1] is ErrorKind.INTERNAL


async def test_a_plain_stream_goes_on_behind_its_text_when_its_engine_died(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        responses = Ways(served, "ensemble").short(WHAT)
        task = asyncio.ensure_future(anext(responses))
        await engine.until(lambda: engine.submits)
        engine.step()
        parts = [(await task).outputs[0].data.item()]
        await engine.end()
        await served.dial(served.answer(" one two three"))
        parts += [one.outputs[0].data.item() async for one in responses]
        assert b"".join(parts) == b" one two three"
