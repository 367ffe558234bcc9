"""Plain text requests take the short way, and get what the long way gives."""

import asyncio
import json
import random
import re
import shutil

import pytest
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import RequestFailed
from trimaran.comm.messages.token_ids import unpack_ids
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.inference.request import InferRequest
from trimaran.server.inference.validation import Validator
from trimaran.server.models.text_request import TextChunk, TextRequest
from trimaran.server.protocol.generate import GenerateEncoder, GenerateMapper

BOTH = pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls"])
WHAT = {"text_input": "A house", "max_tokens": 20}
PLAIN = [
    WHAT,
    {**WHAT, "bad_words": "", "stop_words": ""},
    {**WHAT, "stream": False, "temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {**WHAT, "random_seed": (1 << 64) - 1, "repetition_penalty": 1.1, "min_p": 0.05},
    {**WHAT, "end_id": 5, "pad_id": 7, "min_length": 3, "no_repeat_ngram_size": 2},
    {**WHAT, "exclude_input_in_output": True, "return_log_probs": False, "beam_width": 1},
    {**WHAT, "text_input": ""},
    {**WHAT, "id": "a1", "temperature": 1, "presence_penalty": -0.3},
    {**WHAT, "text_input": "größer 東京 🙂", "early_stopping": False, "frequency_penalty": 0.1},
]
LONG = [
    {**WHAT, "stop_words": ["halt"]},
    {**WHAT, "text_input": ["A house"], "bad_words": "ugly"},
    {**WHAT, "text_input": "a " * 2000},
    {**WHAT, "return_log_probs": True},
    {**WHAT, "return_num_input_tokens": True},
    {**WHAT, "stream": True},
    {**WHAT, "num_return_sequences": 2},
    {**WHAT, "beam_width": 2},
    {**WHAT, "unknown": 3},
    {**WHAT, "num_draft_tokens": 3},
    {**WHAT, "parameters": {"temperature": 0.5}},
]
WRONG = [
    {"text_input": "x"},
    {**WHAT, "max_tokens": 0},
    {**WHAT, "max_tokens": "5"},
    {**WHAT, "temperature": -1.0},
    {**WHAT, "top_p": 1.5},
    {**WHAT, "end_id": 600},
    {**WHAT, "random_seed": -1},
    {**WHAT, "top_k": 1 << 40},
    {**WHAT, "request_type": "context_only"},
]


class Ways:
    """Both ways of one text model."""

    def __init__(self, served, name):
        self.model = served.models[name]
        self.direct = DirectText.of(self.model)
        self.mapper = GenerateMapper(self.model.config, 1 << 20)

    def plain(self, document):
        """The plain request of a body; None if the short way does not take it."""
        found = self.mapper.plain_values(self.mapper.document(json.dumps(document).encode()))
        if found is None:
            return None
        request = InferRequest(model_name=self.model.name, id=found[0])
        return self.direct.reader.of_values(request, found[1])

    async def short(self, document):
        """The answer's bytes by the short way."""
        plain = self.plain(document)
        assert plain is not None, document
        answer = await self.direct.run(self.model, plain)
        response = self.direct.response(plain.request)
        return GenerateEncoder().encode_text(response, self.direct.reader.output, answer.text)

    async def long(self, document):
        """The answer's bytes by the long way."""
        request, wires = self.mapper.parse(json.dumps(document).encode())
        request.inputs = Validator(self.model.config).check(wires, (), request.id)
        (response,) = [each async for each in self.model.infer(request)]
        response.id = request.id
        return GenerateEncoder().encode_short(response)


def _asked(submit):
    """What a request asks of an engine."""
    return (
        unpack_ids(submit.prompt_ids).tolist(), submit.sampling, submit.cache_salt,
        submit.priority, submit.streaming, submit.client_request_id, submit.adapter,
    )  # fmt: skip


async def _same(engine, ways, document):
    """Both ways ask the engine for the same and answer the same."""
    del engine.submits[:]
    assert await ways.short(document) == await ways.long(document)
    short, long = engine.submits
    assert _asked(short) == _asked(long)


@BOTH
@pytest.mark.parametrize("decoupled", ["True", "False"])
async def test_a_plain_request_gets_the_long_ways_answer(serve, name, decoupled):
    async with serve(decoupled_mode=decoupled) as served:
        engine = await served.dial(served.answer(" is größer than 東京 </s>"))
        ways = Ways(served, name)
        for document in PLAIN:
            await _same(engine, ways, document)


@BOTH
async def test_requests_of_other_forms_and_wrong_ones_take_the_long_way(serve, name):
    async with serve() as served:
        await served.dial(served.answer("a"))
        ways = Ways(served, name)
        assert [ways.plain(document) for document in (*LONG, *WRONG)] == [None] * 20


@BOTH
async def test_random_values_are_plain_only_where_the_long_way_takes_them(serve, name):
    choose = random.Random(32)
    values = (
        0, 1, 2, -1, 7, 0.5, 1.0, -0.25, 1e-7, 3e9, 1 << 31, 1 << 63, True, False, "", "a",
        None,
    )  # fmt: skip
    async with serve() as served:
        engine = await served.dial(served.answer(" one two"))
        ways, num_plain = Ways(served, name), 0
        names = [tensor.name for tensor in ways.model.config.input]
        for _ in range(600):
            document = {**WHAT, choose.choice(names): choose.choice(values)}
            if ways.plain(document) is not None:
                num_plain += 1
                await _same(engine, ways, document)
        assert num_plain > 40


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling": {"temperature": 0.7, "seed": 3, "return_perf_metrics": True}},
        {"ignores_end": True, "add_special_tokens": False},
        {"skip_special_tokens": False, "parameters": {"cache_salt": "s"}},
    ],
)
async def test_a_plain_job_gets_the_long_ways_chunk(serve, fields):
    async with serve() as served:
        engine = await served.dial(served.answer(" one two </s> three"))
        model = served.models["ensemble"]
        direct = DirectText.of(model)
        pipeline = direct.reader.pipeline
        prepared = pipeline.adopt(TextRequest(model_name="", prompts=["A house"], **fields))
        answer = await direct.run(model, direct.reader.of_text_request(prepared))
        (chunk,) = [each async for each in model.infer(prepared)]
        assert isinstance(chunk, TextChunk)
        assert (answer.text, answer.token_ids, answer.finish_reason, answer.num_input) == (
            chunk.text, chunk.token_ids, chunk.finish_reason, chunk.num_input,
        )  # fmt: skip
        short, long = engine.submits
        assert _asked(short) == _asked(long)


def _counts(served):
    lines = served.metrics.render().decode().splitlines()
    return [
        line for line in lines
        if re.match(r"nv_inference_(request_success|request_failure|count|exec_count)\{", line)
    ]  # fmt: skip


@BOTH
async def test_every_step_counts_a_request_of_the_short_way(serve, name):
    found = []
    for way in ("short", "long"):
        async with serve(decoupled_mode="False") as served:
            await served.dial(served.answer("a b"))
            await getattr(Ways(served, name), way)(WHAT)
            found.append(_counts(served))
            await served.models[name].wait_idle()
        # The next server writes its repository into the same folder.
        shutil.rmtree(served.config.model_repository)
    assert found[0] == found[1]
    assert sum(line.endswith(("} 1.0", "} 1")) for line in found[0]) == 12


async def test_cancelling_a_plain_request_ends_the_request_at_the_engine(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        ways = Ways(served, "ensemble")
        task = asyncio.ensure_future(ways.short(WHAT))
        await engine.until(lambda: engine.submits)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.until(lambda: engine.cancelled)
        assert engine.cancelled == [engine.submits[0].request_id]
        failed = [line for line in _counts(served) if 'reason="CANCELED"' in line]
        assert sum(line.endswith(("} 1.0", "} 1")) for line in failed) == 2


async def test_a_stop_request_ends_a_plain_request_with_its_text_so_far(serve):
    async with serve(decoupled_mode="False") as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        ways = Ways(served, "ensemble")
        task = asyncio.ensure_future(ways.short({**WHAT, "id": "s1"}))
        await engine.until(lambda: engine.submits)
        await served.infer("ensemble", id="s1", text_input="x", max_tokens=1, stop=True)
        assert json.loads(await task)["text_output"] == "A house"


async def test_an_engines_refusal_of_a_plain_request_names_the_ensemble(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("a"))
        ways = Ways(served, "ensemble")
        await ways.short(WHAT)
        engine.refusals[engine.submits[0].prompt_ids] = (ErrorKind.INVALID_ARG.name, "too odd")
        errors = []
        for way in (ways.short, ways.long):
            with pytest.raises(RequestError) as found:
                await way(WHAT)
            errors.append((str(found.value), found.value.kind))
        assert errors[0] == errors[1]
        assert errors[0][0] == "in ensemble 'ensemble', too odd"


async def test_a_failure_behind_some_ids_is_the_error_of_a_plain_request(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        ways, errors = Ways(served, "ensemble"), []
        for way in (ways.short, ways.long):
            del engine.submits[:]
            task = asyncio.ensure_future(way(WHAT))
            await engine.until(lambda: engine.submits)
            engine.step()
            request_id = engine.submits[0].request_id
            engine.send(RequestFailed(request_id=request_id, kind="INTERNAL", text="broken"))
            with pytest.raises(RequestError) as found:
                await task
            errors.append((str(found.value), found.value.kind))
        assert errors[0] == errors[1] == ("in ensemble 'ensemble', broken", ErrorKind.INTERNAL)


def test_members_with_a_second_meaning_are_not_plain():
    config = ModelConfig(name="m")
    for name in ("text", "id", "parameters"):
        config.input.add(name=name, data_type=DataType.TYPE_STRING, dims=[1], optional=True)
    mapper = GenerateMapper(config, 1 << 20)
    assert mapper.plain_values({"text": "a"}) == ("", {"text": "a"})
    assert mapper.plain_values({"text": "a", "id": "b"}) is None
    assert mapper.plain_values({"text": "a", "parameters": "b"}) is None


async def test_a_plain_request_without_an_engine_is_left_to_the_long_way(serve):
    async with serve() as served:
        assert Ways(served, "ensemble").plain(WHAT) is None
