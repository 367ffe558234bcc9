"""Engines that connect, die and return, as requests see them."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import aclosing

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trimaran.comm.errors import EngineDeadError, ErrorKind, RefusedError, RequestError
from trimaran.comm.messages.messages import Cancel, StatsReport
from trimaran.comm.messages.token_ids import pack_ids, unpack_ids

TEXT = "größer 東京 🙂🎉 and on and on it goes, 👨‍👩‍👧‍👦 until the end of it " * 3


def _start(served, **inputs):
    return asyncio.ensure_future(
        served.texts("ensemble", text_input="x", max_tokens=400, stream=True, **inputs)
    )


async def _die_after(engine, num_tokens: int) -> None:
    """Give some tokens of each request, then break the connection."""
    engine.gate.clear()
    for _ in range(num_tokens):
        engine.step()
    await asyncio.sleep(0.01)
    await engine.end()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
async def test_a_replayed_stream_has_no_gap_and_no_repeat(serve, num_tokens):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        tasks = [_start(served) for _ in range(5)]
        await engine.until(lambda: len(engine.submits) == 5)
        await _die_after(engine, num_tokens)
        await engine.until(lambda: not served.models["ensemble"].is_ready)

        again = await served.dial(served.answer(TEXT), incarnation=1)

        assert ["".join(await task) for task in tasks] == [TEXT] * 5
        assert [len(unpack_ids(s.output_ids)) for s in again.submits] == [num_tokens] * 5
        assert all(s.sampling["max_tokens"] == 400 for s in again.submits)


async def test_a_request_without_streaming_is_replayed_too(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = asyncio.ensure_future(
            served.texts("tensorrt_llm_bls", text_input="x", max_tokens=400)
        )
        await engine.until(lambda: len(engine.submits) == 1)
        await _die_after(engine, 9)
        await served.dial(served.answer(TEXT), incarnation=1)
        assert await task == ["x" + TEXT]


async def test_new_requests_are_refused_without_a_connected_engine(serve):
    async with serve() as served:
        with pytest.raises(EngineDeadError, match="is not at ready state"):
            await served.infer("ensemble", text_input="x", max_tokens=4)
        engine = await served.dial(served.answer("a"))
        assert await served.texts("ensemble", text_input="x", max_tokens=4) == ["xa"]
        await engine.end()
        await engine.until(lambda: not served.models["tensorrt_llm"].is_ready)
        with pytest.raises(EngineDeadError, match="in ensemble 'ensemble', Request for") as got:
            await served.infer("ensemble", text_input="x", max_tokens=4)
        assert got.value.kind is ErrorKind.UNAVAILABLE


async def test_a_request_fails_when_its_engine_does_not_return_in_time(serve):
    async with serve(frontend={"replay_timeout_s": 0.05}) as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served)
        await engine.until(lambda: len(engine.submits) == 1)
        await engine.end()
        with pytest.raises(EngineDeadError, match=r"did not come back within 0\.05 s"):
            await task


async def test_a_request_fails_after_too_many_engine_deaths(serve):
    async with serve(frontend={"max_replays": 2}) as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served)
        for incarnation in (1, 2):
            await engine.until(lambda: len(engine.submits) == 1)  # noqa: B023
            await engine.end()
            engine = await served.dial(served.answer(TEXT), incarnation=incarnation)
        await engine.until(lambda: len(engine.submits) == 1)
        await engine.end()
        with pytest.raises(EngineDeadError, match=r"died 3 times .* \(limit 2\)") as got:
            await task
        assert got.value.kind is ErrorKind.UNAVAILABLE
        engine = await served.dial(served.answer(TEXT), incarnation=3)
        assert await served.texts("ensemble", text_input="x", max_tokens=400) == ["x" + TEXT]
        assert len(engine.submits) == 1


async def test_a_permanently_failed_group_fails_its_requests_at_once(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served)
        await engine.until(lambda: len(engine.submits) == 1)
        await engine.end()
        served.engines.on_group_state(group="g0", state="failed", num_restarts=3)
        with pytest.raises(EngineDeadError, match="is not started again"):
            await task


async def test_a_request_cancelled_during_the_outage_is_not_replayed(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        kept, dropped = _start(served), _start(served)
        await engine.until(lambda: len(engine.submits) == 2)
        await _die_after(engine, 3)
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        again = await served.dial(served.answer(TEXT), incarnation=1)
        assert "".join(await kept) == TEXT
        assert len(again.submits) == 1


GROUPS = {"groups": {"tensorrt_llm": ("g0", "g1")}}


async def test_requests_go_to_the_group_with_the_fewest_requests(serve):
    async with serve(frontend=GROUPS) as served:
        engines = [await served.dial(served.answer(TEXT), group=name) for name in ("g0", "g1")]
        for engine in engines:
            engine.gate.clear()
        tasks = [_start(served) for _ in range(6)]
        await engines[0].until(lambda: [len(e.submits) for e in engines] == [3, 3])
        for engine in engines:
            engine.gate.set()
        assert {"".join(await task) for task in tasks} == {TEXT}


async def test_requests_of_a_dead_group_continue_at_another_group(serve):
    async with serve(frontend=GROUPS) as served:
        first = await served.dial(served.answer(TEXT), group="g0")
        first.gate.clear()
        task = _start(served)
        await first.until(lambda: len(first.submits) == 1)
        second = await served.dial(served.answer(TEXT), group="g1")
        await _die_after(first, 5)
        assert "".join(await task) == TEXT
        assert second.submits[0].group == "g1"
        assert served.models["ensemble"].is_ready


async def test_the_first_restarted_group_takes_over_all_requests(serve):
    async with serve(frontend=GROUPS) as served:
        engines = [await served.dial(served.answer(TEXT), group=name) for name in ("g0", "g1")]
        for engine in engines:
            engine.gate.clear()
        tasks = [_start(served) for _ in range(4)]
        await engines[0].until(lambda: [len(e.submits) for e in engines] == [2, 2])
        await engines[0].end()
        await engines[1].until(lambda: len(engines[1].submits) == 4)
        await engines[1].end()
        await engines[1].until(lambda: not served.models["tensorrt_llm"].is_ready)
        await served.dial(served.answer(TEXT), group="g0", incarnation=1)
        assert {"".join(await task) for task in tasks} == {TEXT}


async def test_a_later_incarnation_replaces_one_that_is_still_connected(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served)
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        await asyncio.sleep(0.01)
        await served.dial(served.answer(TEXT), incarnation=4)
        assert "".join(await task) == TEXT


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"token": "guess"}, "wrong token"),
        ({"protocol_version": 99}, "protocol version 99, but this front end speaks"),
        ({"model": "other"}, "group 'g0' of model 'other' is unknown; known: g0 of"),
        ({"group": "g7"}, "group 'g7' of model 'tensorrt_llm' is unknown"),
        ({"incarnation": 1}, "incarnation 1 is older than 2"),
    ],
)
async def test_an_engine_of_an_unknown_group_is_refused(serve, wrong, reason):
    async with serve() as served:
        await served.dial(served.answer("a"), incarnation=2)
        stranger = type(served.dialled[0])(served.answer("b"))
        answer = await stranger.dial(
            served.config.engine_listen[0], served.hello(**{"incarnation": 3, **wrong})
        )
        assert not answer.accepted
        assert reason in answer.reason
        assert await stranger.receive() is None
        await stranger.end()
        assert await served.texts("ensemble", text_input="x", max_tokens=4) == ["xa"]


async def test_an_engine_that_breaks_the_protocol_is_dropped_and_its_requests_wait(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served)
        await engine.until(lambda: len(engine.submits) == 1)
        engine.send(Cancel(request_ids=[1]))
        await engine.until(lambda: not served.models["tensorrt_llm"].is_ready)
        await served.dial(served.answer(TEXT), incarnation=1)
        assert "".join(await task) == TEXT


async def test_a_refusal_by_the_engine_ends_that_request_only(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("fine"))
        bad = served.tokenizer.encode_now("bad", True)
        engine.refusals = {pack_ids(bad): ("UNSUPPORTED", "'top_k' of 7 is not served; use 1")}
        answers = await asyncio.gather(
            served.texts("ensemble", text_input="bad", max_tokens=9),
            served.texts("ensemble", text_input="x", max_tokens=9),
            return_exceptions=True,
        )
        assert isinstance(answers[0], RequestError)
        assert str(answers[0]) == "in ensemble 'ensemble', 'top_k' of 7 is not served; use 1"
        assert answers[0].kind is ErrorKind.UNSUPPORTED
        assert answers[1] == ["xfine"]


async def test_a_full_engine_refuses_before_the_request_starts(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("fine"))
        prompt = served.tokenizer.encode_now("full", True)
        engine.refusals = {pack_ids(prompt): ("UNAVAILABLE", "the queue is full")}
        with pytest.raises(RefusedError, match="the queue is full"):
            await served.texts("tensorrt_llm_bls", text_input="full", max_tokens=9)


async def test_statistics_and_states_of_engines_are_metrics(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("one two"))
        engine.send(StatsReport(values={"kv_max_blocks": 50, "kv_used_blocks": 5}))
        await served.infer("ensemble", text_input="x", max_tokens=9)
        num_ids = len(served.tokenizer.encode_now("one two", False))

        def value(name: str, **labels: str) -> float:
            labels = {"model": "tensorrt_llm", "version": "1", **labels}
            families = text_string_to_metric_families(served.metrics.render().decode())
            (found,) = (
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == name and sample.labels == labels
            )
            return found

        blocks = "nv_trt_llm_kv_cache_block_metrics"
        assert value(blocks, kv_cache_block_type="max") == 50
        assert value("trimaran_time_to_first_token_seconds_count") == 1
        assert value("trimaran_inter_token_latency_seconds_count") == num_ids - 1
        lengths = {"response_metric_type": "total_output_tokens"}
        assert value("nv_llm_output_token_len_sum", **lengths) == num_ids
        assert value("trimaran_group_up", group="g0") == 1
        await engine.end()
        await engine.until(lambda: value("trimaran_group_up", group="g0") == 0)


async def test_closing_a_stream_leaves_other_streams_unchanged(serve):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        task = _start(served)
        async with aclosing(
            served.stream("tensorrt_llm_bls", text_input="y", max_tokens=400, stream=True)
        ) as other:
            await anext(other)
        assert "".join(await task) == TEXT
        raw = pack_ids(served.tokenizer.encode_now("y", True))
        closed = [s.request_id for s in engine.submits if s.prompt_ids == raw]
        await engine.until(lambda: engine.cancelled == closed)


@pytest.mark.parametrize("num_tokens", [20, 27, 30])
async def test_a_stop_word_is_found_across_a_replay(serve, num_tokens):
    async with serve() as served:
        engine = await served.dial(served.answer(TEXT))
        engine.gate.clear()
        task = _start(served, stop_words=["and on it goes, 👨‍👩"])
        await engine.until(lambda: len(engine.submits) == 1)
        await _die_after(engine, num_tokens)
        await served.dial(served.answer(TEXT), incarnation=1)
        assert "".join(await task) == TEXT[: TEXT.index("👩") + 1]


@pytest.mark.parametrize("seed", range(5))
async def test_streams_survive_deaths_at_any_moment(serve, seed):
    draw = random.Random(seed)
    async with serve(frontend={"max_replays": 100}) as served:
        encode = served.tokenizer.encode_now
        answers = [f"{i}: {TEXT[i:]}" for i in range(20)]
        ids = {pack_ids(encode(f"p{i}", True)): encode(a, False) for i, a in enumerate(answers)}

        def script(submit):
            return ids[submit.prompt_ids]

        engine = await served.dial(script, max_per_step=5)
        tasks = [
            asyncio.ensure_future(
                served.texts("ensemble", text_input=f"p{i}", max_tokens=400, stream=i % 3 > 0)
            )
            for i in range(20)
        ]
        for incarnation in range(1, 8):
            await asyncio.sleep(draw.uniform(0, 0.01))
            await engine.end()
            engine = await served.dial(script, max_per_step=5, incarnation=incarnation)
        for i, task in enumerate(tasks):
            prompt = "" if i % 3 else f"p{i}"
            assert "".join(await task) == prompt + answers[i]


async def test_engines_of_other_hosts_connect_over_tcp(serve, tmp_path):
    # An address of its own: no connection is given this port meanwhile.
    with socket.create_server(("127.0.9.1", 0)) as free:
        port = free.getsockname()[1]
    listen = (f"unix:{tmp_path}/engine.sock", f"tcp:127.0.9.1:{port}")
    async with serve(frontend={"engine_listen": listen}) as served:
        await served.dial(served.answer(TEXT))
        assert "".join(await _start(served)) == TEXT
