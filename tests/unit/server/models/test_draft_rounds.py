"""Draft tokens: of a request to the token model, and of a draft model by the BLS model."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tests.unit.server.models.conftest import FACTS, text_of
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.comm.messages.token_ids import unpack_ids
from trimaran.server.inference.request import Tensor
from trimaran.server.models.draft_rounds import DraftRounds, TokenStep
from trimaran.server.models.text_models import native_pipeline
from trimaran.server.models.token_job import TokenJob

ANSWER = "Hello world and more, größer 東京 🙂🎉 and so on"
_PLACEHOLDER = "${tensorrt_llm_draft_model_name}"
REQUEST = {"text_input": "A house", "max_tokens": 100}


def verified(ids):
    """The answers of an engine that chooses these ids: with drafts, the accepted ids and one
    more."""

    def script(submit):
        if not submit.ends_after_drafts:
            return ids
        drafts = submit.draft_token_ids
        pairs = enumerate(zip(ids, drafts, strict=False))
        num_equal = next((place for place, (a, b) in pairs if a != b), len(drafts))
        return ids[: num_equal + 1]

    return script


@asynccontextmanager
async def with_draft_model(serve, tmp_path, fill=(), **frontend):
    """The five models with these template values, and a copy of the token model whose name is
    draft."""
    async with serve(**dict(fill)):
        pass
    root = tmp_path / "with_draft"
    shutil.move(tmp_path / "models", root)
    shutil.copytree(root / "tensorrt_llm", root / "draft")
    for name, old in (("draft", "tensorrt_llm"), ("tensorrt_llm_bls", _PLACEHOLDER)):
        path = root / name / "config.pbtxt"
        path.write_text(path.read_text().replace(f'"{old}"', '"draft"'))
    groups = {"tensorrt_llm": ("g0",), "draft": ("d0",)}
    async with serve(repository=root, frontend={"groups": groups, **frontend}) as served:
        yield served


@asynccontextmanager
async def two_models(serve, tmp_path, is_wrong=lambda place: False, draft_facts=(), fill=()):
    """A target model and a draft model, whose ids are wrong at these places of the output."""
    async with with_draft_model(serve, tmp_path, fill) as served:
        ids = served.tokenizer.encode_now(ANSWER, False)
        wrong = [(each + 1) % 600 if is_wrong(i) else each for i, each in enumerate(ids)]

        def drafted(submit):
            done = unpack_ids(submit.output_ids).tolist()
            return done + wrong[len(done) :]

        target = await served.dial(verified(ids))
        draft = await served.dial(
            drafted, model="draft", group="d0", facts={**FACTS, **dict(draft_facts)}
        )
        yield served, target, draft


def lengths(engine):
    """(Ids of the output so far, ids asked for at most, draft ids) of each request."""
    return [
        (len(s.output_ids) // 4, s.sampling["max_tokens"], len(s.draft_token_ids))
        for s in engine.submits
    ]


def told(response):
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


@pytest.mark.feature("input:num_draft_tokens", "parameter:tensorrt_llm_draft_model_name",
                     of="text")  # fmt: skip
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize(
    "is_wrong",
    [lambda i: False, lambda i: True, lambda i: i % 3 == 2],
    ids=["right", "wrong", "mixed"],
)
async def test_a_text_with_drafts_equals_the_text_without(
    serve, tmp_path, is_wrong, num_drafts
):
    async with two_models(serve, tmp_path, is_wrong) as (served, target, _):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        target.submits.clear()
        (text,) = await served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=num_drafts)

    assert text == plain
    assert ANSWER in text
    assert all(s.ends_after_drafts for s in target.submits if s.draft_token_ids)


async def test_each_round_drafts_behind_the_output_and_leaves_room_for_one_more_id(
    serve, tmp_path
):
    async with two_models(serve, tmp_path, lambda i: i == 4) as (served, target, draft):
        request = {**REQUEST, "max_tokens": 9, "num_draft_tokens": 3, "random_seed": 7}
        await served.texts("tensorrt_llm_bls", **request, temperature=0.5, min_length=2)

    # The fifth id is wrong: the second round accepts none, and so gives one id.
    assert lengths(draft) == [(0, 3, 0), (4, 7, 0), (5, 8, 0)]
    assert [s.sampling["min_tokens"] for s in draft.submits] == [3, 7, 8]
    assert lengths(target) == [(0, 4, 3), (4, 8, 7), (5, 9, 8)]
    for submit in (*target.submits, *draft.submits):
        assert submit.sampling["seed"] == 7
        assert (
            unpack_ids(submit.prompt_ids).tolist()
            == unpack_ids(target.submits[0].prompt_ids).tolist()
        )
    assert {s.sampling["min_tokens"] for s in target.submits} == {2}


@pytest.mark.feature("output:acceptance_rate", "output:total_draft_tokens",
                     "output:total_accepted_draft_tokens", of="text")  # fmt: skip
async def test_the_answer_has_the_drafts_of_all_rounds(serve, tmp_path):
    async with two_models(serve, tmp_path, lambda i: i % 3 == 2) as (served, target, _):
        target.extras = lambda ids: {
            "figures": {"total_draft_tokens": 3, "total_accepted_draft_tokens": 1,
                        "arrival_time_ns": len(target.submits), "last_token_time_ns": 9}
        }  # fmt: skip
        asked = {**REQUEST, "num_draft_tokens": 3, "return_perf_metrics": True}
        (response,) = await served.infer("tensorrt_llm_bls", **asked)
        num_rounds = len(target.submits)

    figures = told(response)
    # The last round has one id to come, and needs no drafts; this engine counts it like others.
    assert figures["total_draft_tokens"] == [[3 * num_rounds]]
    assert figures["total_accepted_draft_tokens"] == [[num_rounds]]
    assert figures["acceptance_rate"] == [[pytest.approx(1 / 3)]]
    assert figures["arrival_time_ns"] == [[1]]


async def test_log_probs_of_all_rounds_are_in_one_answer(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, target, _):
        target.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        asked = {**REQUEST, "max_tokens": 8, "num_draft_tokens": 3, "return_log_probs": True}
        (response,) = await served.infer("tensorrt_llm_bls", **asked)

    assert told(response)["output_log_probs"] == [[[-0.5] * 8]]
    assert told(response)["cum_log_probs"] == [[-4.0]]


async def test_a_stop_word_within_a_round_ends_the_text_and_the_rounds(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, target, _):
        asked = {**REQUEST, "stop_words": ["and"]}
        (plain,) = await served.texts("tensorrt_llm_bls", **asked)
        target.submits.clear()
        (text,) = await served.texts("tensorrt_llm_bls", **asked, num_draft_tokens=5)
        num_rounds = len(target.submits)
        num_ids = len(served.tokenizer.encode_now(ANSWER, False))

    assert text == plain
    assert text.endswith("Hello world and")
    assert num_rounds < num_ids // 6


async def test_a_stop_request_ends_the_rounds_while_the_draft_model_runs(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, target, draft):
        draft.gate.clear()
        running = asyncio.ensure_future(
            served.infer("tensorrt_llm_bls", id="7", **REQUEST, num_draft_tokens=5)
        )
        await draft.until(lambda: draft.submits)
        await served.infer("tensorrt_llm_bls", id="7", text_input="", max_tokens=1, stop=True)
        draft.gate.set()
        (response,) = await running

    assert text_of(response) == "A house"
    assert len(target.submits) <= 1


async def test_a_stop_request_between_two_rounds_ends_them(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, _, _):
        steps = native_pipeline(served.models["tensorrt_llm_bls"]).steps
        ids = {"input_ids": [[5]], "input_lengths": [[1]], "request_output_len": [[60]]}
        inputs = {name: Tensor(name, "INT32", np.array(v, np.int32)) for name, v in ids.items()}
        job = TokenJob(model_name="tensorrt_llm", id="7", inputs=inputs)
        target = TokenStep(steps.token, steps.facts)
        async with DraftRounds(target, steps.draft, steps.arrivals, job, 3) as rounds:
            first = await anext(rounds.responses)
            stop = {"text_input": "", "max_tokens": 1, "stop": True}
            await served.infer("tensorrt_llm_bls", id="7", **stop)
            (last,) = [each async for each in rounds.responses]

    assert len(first.chunk.token_ids) == 4
    assert (last.chunk.token_ids, last.chunk.finish_reason) == ([], FinishReason.CANCELLED)


async def test_queue_timeouts_end_no_request_that_has_output(serve, tmp_path):
    fill = {"max_queue_size": "0 default_timeout_microseconds: 500000"}
    async with two_models(serve, tmp_path, fill=fill) as (served, target, draft):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        draft.submits.clear()
        target.submits.clear()
        running = await _at_second_draft(served, draft)
        target.gate.clear()
        # The drafts of the second round do not come in time: the target goes on alone.
        await draft.until(lambda: draft.cancelled)
        await target.until(lambda: len(target.submits) == 2)
        await asyncio.sleep(0.7)
        target.gate.set()
        (text,) = await running

    assert text == plain
    assert not target.submits[1].draft_token_ids


@pytest.mark.feature("input:use_draft_logits", of="text")
@pytest.mark.parametrize(
    ("sampling", "is_sent"),
    [
        ({"top_k": 9}, True),
        ({"top_k": 9, "random_seed": 4}, False),
        ({"top_k": 1}, False),
    ],
)
async def test_logits_of_drafts_go_to_the_target_model_if_they_matter(
    serve, tmp_path, sampling, is_sent
):
    async with two_models(serve, tmp_path) as (served, target, draft):
        row = np.arange(620, dtype="<f4")
        draft.extras = lambda ids: {"generation_logits": [row.tobytes()] * len(ids)}
        asked = {**REQUEST, "max_tokens": 6, "num_draft_tokens": 2, "use_draft_logits": True}
        await served.texts("tensorrt_llm_bls", **asked, **sampling)

    first, second = target.submits
    assert [len(submit.draft_token_ids) for submit in (first, second)] == [2, 5]
    for submit in target.submits:
        found = np.frombuffer(submit.draft_logits, "<f4").reshape(-1, 600)
        assert (found == row[:600]).all()
        assert len(found) == 2 * is_sent
    assert draft.submits[0].sampling.get("return_generation_logits", False) == is_sent


@pytest.mark.parametrize("serves_guides", [True, False])
async def test_a_guide_goes_to_the_models_that_serve_guides(serve, tmp_path, serves_guides):
    facts = {"serves_guides": serves_guides}
    async with two_models(serve, tmp_path, draft_facts=facts) as (served, target, draft):
        guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z ]+"}
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST, **guide)
        target.submits.clear()
        (text,) = await served.texts("tensorrt_llm_bls", **REQUEST, **guide, num_draft_tokens=3)

    assert text == plain
    assert {submit.sampling["guide_type"] for submit in target.submits} == {"regex"}
    for submit in draft.submits:
        assert submit.sampling.get("guide_type", "") == ("regex" if serves_guides else "")
        # With a minimum the guide may leave no id.
        assert "min_tokens" not in submit.sampling or not submit.sampling["min_tokens"]


@pytest.mark.parametrize("limit", [0, 2])
async def test_a_limit_of_draft_tokens_holds_in_rounds(serve, tmp_path, limit):
    async with two_models(serve, tmp_path) as (served, target, draft):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        target.submits.clear()
        asked = {**REQUEST, "num_draft_tokens": 5, "parameters": {"max_draft_tokens": limit}}
        (text,) = await served.texts("tensorrt_llm_bls", **asked)

    assert text == plain
    num_drafts = {max(0, ids - known) for known, _, ids in lengths(target)}
    assert max(num_drafts) == limit
    assert bool(draft.submits) == bool(limit)


async def test_logits_that_no_answer_holds_are_refused_before_the_first_round(serve, tmp_path):
    facts = {**FACTS, "max_seq_len": 1 << 21}
    async with with_draft_model(serve, tmp_path) as served:
        engines = [
            await served.dial(served.answer(ANSWER), facts=facts, **fields)
            for fields in ({}, {"model": "draft", "group": "d0"})
        ]
        asked = {**REQUEST, "max_tokens": 1 << 20, "return_generation_logits": True}
        for num_draft_tokens in (0, 5):
            with pytest.raises(RequestError, match="but an answer holds"):
                await served.infer(
                    "tensorrt_llm_bls", **asked, num_draft_tokens=num_draft_tokens
                )
    assert not any(engine.submits for engine in engines)


async def test_rounds_go_on_where_an_engine_died(serve, tmp_path):
    async with two_models(serve, tmp_path, lambda i: i % 4 == 3) as (served, target, draft):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        answer = target.script
        target.submits.clear()
        for engine in (target, draft):
            engine.gate.clear()
        running = asyncio.ensure_future(
            served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)
        )
        await draft.until(lambda: draft.submits)
        draft.gate.set()
        await target.until(lambda: target.submits)
        # The target dies in the middle of its first verify, two ids of which are known.
        target.step()
        target.step()
        await target.until(lambda: target.num_live)
        await target.end()
        again = await served.dial(answer, incarnation=1)
        (text,) = await running

    assert text == plain
    first = again.submits[0]
    assert (len(first.output_ids) // 4, len(first.draft_token_ids)) == (2, 3)
    assert first.ends_after_drafts


async def test_rounds_wait_for_a_target_that_restarts_between_two_of_them(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, target, draft):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        answer = target.script
        draft.submits.clear()
        running = await _at_second_draft(served, draft)
        await target.end()
        await target.until(lambda: not served.models["tensorrt_llm"].is_ready)
        draft.gate.set()
        await draft.until(lambda: not draft.num_live)
        again = await served.dial(answer, incarnation=1)
        (text,) = await running
        assert again.submits

    assert text == plain


async def test_the_target_goes_on_alone_where_the_draft_model_dies(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, target, draft):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        draft.submits.clear()
        target.submits.clear()
        target.gate.clear()
        running = asyncio.ensure_future(
            served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)
        )
        await target.until(lambda: target.submits)
        await draft.end()
        await target.until(lambda: not served.models["draft"].is_ready)
        target.gate.set()
        (text,) = await running
        with pytest.raises(RequestError, match="'draft' version 1 is not at ready state"):
            await served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)

    assert text == plain
    num_drafts, *others = [len(s.draft_token_ids) for s in target.submits]
    assert (num_drafts, set(others)) == (3, {0})


async def _at_second_draft(served, draft):
    """A request whose second round waits for its drafts."""
    draft.gate.set()
    running = asyncio.ensure_future(
        served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)
    )
    await draft.until(lambda: len(draft.submits) == 1)
    draft.gate.clear()
    while len(draft.submits) < 2:
        # The first round's drafts may not be complete yet.
        if draft.num_live:
            draft.step()
        await asyncio.sleep(0)
    return running


async def test_rounds_end_where_the_draft_model_has_no_more_room(serve, tmp_path):
    async with two_models(serve, tmp_path, draft_facts={"max_seq_len": 12}) as (
        served,
        target,
        draft,
    ):
        (plain,) = await served.texts("tensorrt_llm_bls", **REQUEST)
        target.submits.clear()
        (text,) = await served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)
        num_prompt = len(target.submits[0].prompt_ids) // 4

    assert text == plain
    assert draft.submits
    assert all(num_prompt + s.sampling["max_tokens"] <= 12 for s in draft.submits)
    assert not target.submits[-1].draft_token_ids


async def test_a_stop_word_in_the_text_ends_a_target_that_goes_on_alone(serve, tmp_path):
    async with two_models(serve, tmp_path, draft_facts={"max_seq_len": 2}) as (
        served,
        target,
        draft,
    ):
        asked = {**REQUEST, "stop_words": ["and"], "return_perf_metrics": True}
        (plain,) = await served.texts("tensorrt_llm_bls", **asked)
        target.extras = lambda ids: {"figures": {"total_draft_tokens": 2}}
        target.gate.clear()
        running = asyncio.ensure_future(
            served.infer("tensorrt_llm_bls", **asked, num_draft_tokens=3)
        )
        await target.until(lambda: target.num_live)
        num_steps = 0
        while not running.done():
            target.step()
            num_steps += 1
            await served.processed(target)
        (response,) = await running
        num_ids = len(served.tokenizer.encode_now(ANSWER, False))

    assert text_of(response) == plain
    assert told(response)["total_draft_tokens"] == [[2]]
    assert num_steps < num_ids
    assert draft.submits == []


async def test_drafts_outside_the_targets_vocabulary_are_left_out(serve, tmp_path):
    async with two_models(serve, tmp_path, draft_facts={"vocab_size": 700}) as (
        served,
        target,
        draft,
    ):
        draft.script = lambda submit: [*unpack_ids(submit.output_ids).tolist(), 650, 650]
        (text,) = await served.texts("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)

    assert ANSWER in text
    assert all(each < 600 for s in target.submits for each in s.draft_token_ids)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"stream": True}, "streaming is not supported with speculative decoding"),
        (
            {"return_context_logits": True},
            "context logits are not supported with speculative decoding",
        ),
        ({"beam_width": 2}, "beam_width is 2 but must be 1 with speculative decoding"),
        (
            {"num_return_sequences": 2},
            "num_return_sequences is 2 but must be 1 with speculative decoding",
        ),
        (
            {"prompt_embedding_table": np.ones((1, 2, 4), np.float16)},
            "prompt_embedding_table is not supported with speculative decoding",
        ),
        (
            {"text_input": np.array([[b"a"], [b"b"]], object),
             "max_tokens": np.full((2, 1), 3, np.int32),
             "num_draft_tokens": np.full((2, 1), 3, np.int32)},
            "speculative decoding is not supported with batch size > 1",
        ),
        (
            {"num_draft_tokens": 6},
            "num_draft_tokens is 6 but the engine of 'tensorrt_llm' verifies at most 5",
        ),
    ],
)  # fmt: skip
async def test_what_drafts_cannot_do_is_refused(serve, tmp_path, inputs, text):
    async with two_models(serve, tmp_path) as (served, target, draft):
        with pytest.raises(RequestError, match=re.escape(text)):
            await served.infer(
                "tensorrt_llm_bls", **{**REQUEST, "num_draft_tokens": 3, **inputs}
            )
    assert target.submits == draft.submits == []


async def test_an_error_of_the_draft_model_names_the_model(serve, tmp_path):
    async with two_models(serve, tmp_path) as (served, _, draft):
        prompt = served.tokenizer.encode_now("A house", True)
        draft.refusals[np.array(prompt, "<i4").tobytes()] = ("INVALID_ARG", "no such guide")
        with pytest.raises(RequestError, match="draft model 'draft': no such guide"):
            await served.infer("tensorrt_llm_bls", **REQUEST, num_draft_tokens=3)
        (text,) = await served.texts("tensorrt_llm_bls", **REQUEST)
    assert ANSWER in text
