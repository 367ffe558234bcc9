"""Text that streams out of an engine: complete, in order, and of its own request."""

from __future__ import annotations

import asyncio
import itertools
import random
from contextlib import aclosing

import numpy as np
import pytest

TEXTS = (
    "plain words, and more of them",
    "größer, schöner 東京 — with 🙂🎉🙂 and a family 👨‍👩‍👧‍👦 in it",
    " leading and trailing spaces  \n\n  kept ",
    "\t日本語のテキスト\u00a0と\u3000空白 ",
)


def _random_text(seed: int) -> str:
    draw = random.Random(seed)
    alphabets = (
        "abc def ",
        "äöüß éèê",
        "東京都 日本",
        "🙂🎉👨‍👩‍👧‍👦🏳️‍🌈",
        " \n\t  ",
        "кириллица ",
    )
    return "".join(draw.choice(draw.choice(alphabets)) for _ in range(draw.randint(1, 60)))


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("max_per_step", [1, 3, 40])
async def test_streamed_deltas_join_to_the_whole_text(serve, model, max_per_step):
    async with serve() as served:
        for text in (*TEXTS, *map(_random_text, range(30))):
            engine = await served.dial(
                served.answer(text), max_per_step=max_per_step, incarnation=len(served.dialled)
            )
            deltas = await served.texts(
                model, text_input="東京 is 🙂", max_tokens=400, stream=True
            )
            assert "".join(deltas) == text
            assert not any("\ufffd" in delta for delta in deltas)
            assert engine.num_live == 0


async def test_a_stream_has_a_response_for_each_step_that_completes_text(serve):
    async with serve() as served:
        await served.dial(served.answer("one two three"))
        responses = await served.infer("ensemble", text_input="x", max_tokens=100, stream=True)
        num_ids = len(served.tokenizer.encode_now("one two three", False))
        assert len(responses) == num_ids
        assert [r.is_final for r in responses] == [False] * (num_ids - 1) + [True]


async def test_two_hundred_streams_at_once_are_not_mixed_up(serve):
    async with serve() as served:
        texts = {f"prompt {i}": f"answer {i} " + _random_text(i) for i in range(200)}
        encode = served.tokenizer.encode_now
        answers = {
            np.array(encode(prompt, True), "<i4").tobytes(): encode(text, False)
            for prompt, text in texts.items()
        }
        await served.dial(lambda submit: answers[submit.prompt_ids], max_per_step=4)
        given = await asyncio.gather(
            *(
                served.texts("ensemble", text_input=prompt, max_tokens=400, stream=True)
                for prompt in texts
            )
        )
        assert ["".join(deltas) for deltas in given] == list(texts.values())


async def test_a_slow_reader_gets_all_text_in_fewer_responses(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("many small words " * 10))
        async with aclosing(
            served.stream("tensorrt_llm_bls", text_input="x", max_tokens=400, stream=True)
        ) as responses:
            first = await anext(responses)
            await engine.until(lambda: engine.num_live == 0)
            await served.processed(engine)
            rest = [response async for response in responses]
        text = "".join(r.outputs[0].data.item().decode() for r in (first, *rest))
        assert text == "many small words " * 10
        assert len(rest) == 1


async def test_closing_a_stream_cancels_it_at_the_engine(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("a b c d e f g h " * 30))
        responses = served.stream("ensemble", text_input="x", max_tokens=400, stream=True)
        await anext(responses)
        await responses.aclose()
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])
        assert engine.num_live == 0


async def test_a_cancelled_task_cancels_its_request_at_the_engine(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("a b c d e f g h " * 30))
        engine.gate.clear()
        task = asyncio.ensure_future(served.infer("ensemble", text_input="x", max_tokens=400))
        await engine.until(lambda: len(engine.submits) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


@pytest.mark.feature("parameter:accumulate_tokens", of="text")
async def test_accumulated_streams_repeat_the_text_so_far(serve):
    async with serve(accumulate_tokens="true") as served:
        await served.dial(served.answer("größer 🙂 end"))
        texts = await served.texts(
            "tensorrt_llm_bls", text_input="x", max_tokens=100, stream=True
        )
        assert texts[-1] == "größer 🙂 end"
        assert len(texts) > 2
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
