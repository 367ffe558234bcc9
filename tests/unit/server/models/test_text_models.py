"""Ensemble and BLS: text in, text out, over the three models between them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import unpack_ids

TEXT_MODELS = pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])


def _values(response):
    return {
        tensor.name: tensor.data.item() for tensor in response.outputs if tensor.data.size == 1
    }


@pytest.mark.feature("input:text_input", "output:text_output", of="text")
@TEXT_MODELS
async def test_an_answer_is_the_prompt_and_its_continuation(serve, model):
    async with serve() as served:
        await served.dial(served.answer(" is größer than 東京 </s>"))
        (response,) = await served.infer(model, text_input="A house", max_tokens=99)
        (output,) = response.outputs
        assert (output.name, output.datatype, output.shape) == ("text_output", "BYTES", (1,))
        assert output.data.item().decode() == "A house is größer than 東京 "
        assert response.is_final


async def test_only_the_ensemble_adds_sequence_parameters(serve):
    async with serve() as served:
        await served.dial(served.answer("a"))
        (of_ensemble,) = await served.infer("ensemble", text_input="x", max_tokens=1)
        (of_bls,) = await served.infer("tensorrt_llm_bls", text_input="x", max_tokens=1)
        assert of_ensemble.parameters == {
            "sequence_id": 0,
            "sequence_start": False,
            "sequence_end": False,
        }
        assert of_bls.parameters == {}


@pytest.mark.feature(
    "input:max_tokens",
    "input:top_k",
    "input:top_p",
    "input:temperature",
    "input:repetition_penalty",
    "input:length_penalty",
    "input:min_length",
    "input:random_seed",
    "input:bad_words",
    "input:stop_words",
    "input:end_id",
    "input:min_p",
    "input:top_p_min",
    "input:top_p_decay",
    "input:top_p_reset_ids",
    "input:early_stopping",
    "input:beam_search_diversity_rate",
    "input:no_repeat_ngram_size",
    "input:presence_penalty",
    "input:frequency_penalty",
    of="text",
)
@TEXT_MODELS
async def test_inputs_reach_the_engine_under_the_token_models_names(serve, model):
    async with serve() as served:
        engine = await served.dial(served.answer("a"))
        encode = served.tokenizer.encode_now
        await served.infer(
            model,
            text_input="Hello",
            max_tokens=7,
            top_k=5,
            top_p=0.5,
            temperature=0.25,
            repetition_penalty=1.5,
            length_penalty=2.0,
            min_length=3,
            random_seed=11,
            bad_words=["ugly", ""],
            stop_words=["halt", "</s>"],
            end_id=5,
            beam_width=1,
            min_p=0.125,
            top_p_min=0.25,
            top_p_decay=0.75,
            top_p_reset_ids=9,
            early_stopping=False,
            beam_search_diversity_rate=0.5,
            no_repeat_ngram_size=4,
            presence_penalty=0.75,
            frequency_penalty=-0.5,
        )
        (submit,) = engine.submits
        assert unpack_ids(submit.prompt_ids).tolist() == encode("Hello", True)
        assert SamplingParams.from_wire(submit.sampling) == SamplingParams(
            max_tokens=7,
            top_k=5,
            top_p=0.5,
            temperature=0.25,
            repetition_penalty=1.5,
            length_penalty=2.0,
            min_tokens=3,
            seed=11,
            bad_words=(tuple(encode("ugly", False)),),
            stop_words=(tuple(encode("halt", False)), (1,)),
            end_id=5,
            pad_id=2,
            min_p=0.125,
            top_p_min=0.25,
            top_p_decay=0.75,
            top_p_reset_ids=9,
            early_stopping=0,
            beam_search_diversity_rate=0.5,
            no_repeat_ngram_size=4,
            presence_penalty=0.75,
            frequency_penalty=-0.5,
        )


@pytest.mark.feature("input:embedding_bias_words", "input:embedding_bias_weights", of="text")
@TEXT_MODELS
async def test_biased_words_bias_each_of_their_ids(serve, model):
    async with serve() as served:
        engine = await served.dial(served.answer("a"))
        await served.infer(
            model,
            text_input="x",
            max_tokens=1,
            embedding_bias_words=["zebra", "zoo"],
            embedding_bias_weights=[2.0, -1.0],
        )
        expected = np.zeros(600, np.float32)
        for word, weight in (("zebra", 2.0), ("zoo", -1.0)):
            for token in served.tokenizer.encode_now(word, True):
                expected[token] += weight
        found = np.frombuffer(engine.submits[0].sampling["embedding_bias"], "<f4")
        np.testing.assert_array_equal(found, expected)


@pytest.mark.feature("output:batch_index", "input:stream", of="text")
@TEXT_MODELS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_texts_gives_one_answer_each(serve, model, stream):
    async with serve() as served:
        answers = {"one": " answer", "two and more": " reply 🙂", "drei": " größer"}
        encode = served.tokenizer.encode_now
        await served.dial(
            lambda submit: next(
                encode(answer, False)
                for text, answer in answers.items()
                if encode(text, True) == unpack_ids(submit.prompt_ids).tolist()
            )
        )
        texts = np.array([[text.encode()] for text in answers], dtype=object)
        responses = await served.infer(
            model,
            text_input=texts,
            max_tokens=np.full((3, 1), 50, np.int32),
            stream=np.full((3, 1), stream),
        )
        found = ["", "", ""]
        for response in responses:
            assert all(tensor.shape[0] == 1 for tensor in response.outputs)
            found[_values(response)["batch_index"]] += _values(response)["text_output"].decode()
        prompts = [""] * 3 if stream else list(answers)
        assert found == [p + a for p, a in zip(prompts, answers.values(), strict=True)]
        assert [r.is_final for r in responses].index(True) == len(responses) - 1


@pytest.mark.feature("input:num_return_sequences", "output:sequence_index", of="text")
@TEXT_MODELS
async def test_further_outputs_are_sent_only_if_requested(serve, model):
    async with serve() as served:
        engine = await served.dial(served.answer("one two"))
        engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        inputs = {
            "text_input": "x",
            "max_tokens": 99,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
            "return_log_probs": True,
            "num_return_sequences": 2,
        }
        num_ids = len(served.tokenizer.encode_now("one two", False))
        for response in await served.infer(model, **inputs):
            tensors = {tensor.name: tensor.data for tensor in response.outputs}
            assert tensors["num_input_tokens"].tolist() == [[2]]
            assert tensors["num_output_tokens"].tolist() == [[num_ids]]
            assert tensors["cum_log_probs"].tolist() == [[-num_ids / 2]]
            assert tensors["output_log_probs"].tolist() == [[[-0.5] * num_ids]]
            assert tensors["sequence_index"].item() in (0, 1)
        responses = await served.infer(model, outputs=("text_output",), **inputs)
        assert [[o.name for o in r.outputs] for r in responses] == [["text_output"]] * 2


# ---- stop words -------------------------------------------------------------------------


@TEXT_MODELS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_per_step", [1, 5])
async def test_a_stop_word_stays_and_what_follows_is_cut(serve, model, stream, max_per_step):
    async with serve() as served:
        answer = "we go on and on until größer 東京 comes, and then more of it " * 5
        engine = await served.dial(served.answer(answer), max_per_step=max_per_step)
        for word in ("r 東", "ntil g", "and then", "e"):
            texts = await served.texts(
                model, text_input="x", max_tokens=400, stop_words=["never", word], stream=stream
            )
            end = answer.index(word) + len(word)
            assert "".join(texts) == ("" if stream else "x") + answer[:end]
        await engine.until(lambda: len(engine.cancelled) == 4)


async def test_a_stop_word_of_the_prompt_does_not_stop(serve):
    async with serve() as served:
        await served.dial(served.answer(" and on"))
        texts = await served.texts(
            "ensemble", text_input="a stop is", max_tokens=99, stop_words=["stop"]
        )
        assert texts == ["a stop is and on"]


async def test_a_partial_stop_word_is_sent_after_a_mismatch(serve):
    async with serve() as served:
        await served.dial(served.answer("one stopwatch, no more sto"))
        texts = await served.texts(
            "ensemble", text_input="x", max_tokens=99, stop_words=["stopped"], stream=True
        )
        assert "".join(texts) == "one stopwatch, no more sto"


async def test_a_stop_word_ends_its_own_sequence_only(serve):
    async with serve() as served:
        encode = served.tokenizer.encode_now
        answers = ["first stop and more", "second goes on to its end"]
        await served.dial(lambda submit: encode(answers[submit.sequence_index], False))
        responses = await served.infer(
            "ensemble",
            text_input="x",
            max_tokens=99,
            stop_words=["stop"],
            num_return_sequences=2,
            exclude_input_in_output=True,
        )
        found = {_values(r)["sequence_index"]: _values(r)["text_output"] for r in responses}
        assert found == {0: b"first stop", 1: b"second goes on to its end"}


# ---- policy and errors ------------------------------------------------------------------


@TEXT_MODELS
async def test_a_repository_that_is_not_decoupled_answers_once_and_refuses_streams(
    serve, model
):
    async with serve(decoupled_mode="False") as served:
        await served.dial(served.answer("a b"))
        assert not served.models[model].is_decoupled
        assert await served.texts(model, text_input="x", max_tokens=99) == ["xa b"]
        with pytest.raises(
            RequestError, match="Streaming is only supported if model is deploy"
        ):
            await served.texts(model, text_input="x", max_tokens=99, stream=True)
        with pytest.raises(RequestError, match="Batch size > 1 requires the tensorrt_llm"):
            await served.infer(
                model,
                text_input=np.array([[b"x"], [b"y"]], dtype=object),
                max_tokens=np.ones((2, 1), np.int32),
            )


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"max_tokens": 0}, "max_tokens must be a single value > 0"),
        ({"num_draft_tokens": 4}, "cannot perform speculative decoding without draft model"),
        (
            {"image_url_input": "http://x"},
            "input 'image_url_input' is set but images are not served",
        ),
        (
            {"image_input": np.zeros((1, 1, 3, 2, 2), np.float16)},
            "input 'image_input' is set but images are not served",
        ),
    ],
)
async def test_bls_refuses_unsupported_requests(serve, inputs, text):
    async with serve() as served:
        engine = await served.dial(served.answer("a"))
        with pytest.raises(RequestError) as got:
            await served.infer(
                "tensorrt_llm_bls", **{"text_input": "x", "max_tokens": 3, **inputs}
            )
        assert str(got.value) == text
        assert engine.submits == []


async def test_accumulation_takes_one_text_and_one_beam(serve):
    async with serve(accumulate_tokens="yes") as served:
        await served.dial(served.answer("a"))
        with pytest.raises(RequestError, match="Expected batch size of 1"):
            await served.infer(
                "tensorrt_llm_bls",
                text_input=np.array([[b"x"], [b"y"]], dtype=object),
                max_tokens=np.ones((2, 1), np.int32),
            )
        with pytest.raises(RequestError, match="only implemented for beam width = 1"):
            await served.infer("tensorrt_llm_bls", text_input="x", max_tokens=1, beam_width=2)


async def test_errors_of_steps_name_the_ensemble_and_keep_their_kind(serve):
    async with serve() as served:
        await served.dial(served.answer("a"))
        with pytest.raises(RequestError) as got:
            await served.infer("ensemble", text_input=b"\xff", max_tokens=1)
        assert str(got.value).startswith(
            "in ensemble 'ensemble', input 'text_input' is not UTF-8"
        )
        with pytest.raises(RequestError) as got:
            await served.infer("ensemble", text_input="word " * 400, max_tokens=1)
        assert str(got.value).startswith("in ensemble 'ensemble', Prompt length (")
        assert got.value.kind is ErrorKind.INVALID_ARG


async def test_each_step_counts_a_text_request_once(serve):
    async with serve() as served:
        await served.dial(served.answer("a b c stop d e f"))
        for stream in (False, True):
            await served.infer(
                "ensemble", text_input="x", max_tokens=9, stop_words=["stop"], stream=stream
            )
        with pytest.raises(RequestError):
            await served.infer("ensemble", text_input="x", max_tokens=0)
        counts = {
            name: (
                model.statistics.message().inference_stats.success.count,
                model.statistics.message().inference_stats.fail.count,
            )
            for name, model in served.models.items()
        }
        assert counts == {
            "preprocessing": (3, 0),
            "tensorrt_llm": (2, 1),
            "postprocessing": (2, 0),
            "ensemble": (2, 1),
            "tensorrt_llm_bls": (0, 0),
        }


async def test_bls_requests_do_not_wait_for_each_other(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("a b c"))
        engine.gate.clear()
        tasks = [
            asyncio.ensure_future(
                served.texts("tensorrt_llm_bls", text_input="x", max_tokens=9)
            )
            for _ in range(50)
        ]
        await engine.until(lambda: len(engine.submits) == 50)
        engine.gate.set()
        assert await asyncio.gather(*tasks) == [["xa b c"]] * 50


@TEXT_MODELS
@pytest.mark.parametrize("stream", [False, True])
async def test_models_without_a_batch_dimension_answer_without_one(serve, model, stream):
    async with serve(triton_max_batch_size="0") as served:
        await served.dial(served.answer("one größer two stop three"))
        responses = await served.infer(
            model,
            text_input="x",
            max_tokens=99,
            stop_words=["stop"],
            stream=stream,
            return_num_output_tokens=True,
        )
        assert all(tensor.shape == (1,) for r in responses for tensor in r.outputs)
        text = b"".join(_values(r)["text_output"] for r in responses).decode()
        assert text == ("" if stream else "x") + "one größer two stop"


@TEXT_MODELS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_per_step", [1, 40])
async def test_tokens_behind_a_stop_word_are_not_counted(serve, model, stream, max_per_step):
    async with serve() as served:
        engine = await served.dial(
            served.answer("one two stop three four five"), max_per_step=max_per_step
        )
        engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        options = {"return_num_output_tokens": True, "return_log_probs": True}
        responses = await served.infer(
            model, text_input="x", max_tokens=99, stop_words=["stop"], stream=stream, **options
        )
        told = [{t.name: t.data for t in response.outputs} for response in responses]
        num_ids = len(served.tokenizer.encode_now("one two stop", False))
        assert told[-1]["output_log_probs"].size == num_ids
        assert told[-1]["num_output_tokens"].item() == num_ids
        assert told[-1]["cum_log_probs"].item() == pytest.approx(-0.5 * num_ids)


async def test_the_documented_name_of_the_length_penalty_reaches_the_engine(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("one"))
        request = {"text_input": "A", "max_tokens": 9}
        await served.infer("tensorrt_llm_bls", parameters={"len_penalty": 2}, **request)
        assert engine.submits[-1].sampling["length_penalty"] == 2.0
        for parameters, named, said in (
            ({"len_penalty": "2"}, {}, "must be a number"),
            ({"len_penalty": 2.0}, {"length_penalty": 1.0}, "two names of one input"),
        ):
            with pytest.raises(RequestError, match=said):
                await served.infer(
                    "tensorrt_llm_bls", parameters=parameters, **request, **named
                )
