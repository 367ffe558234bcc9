"""The token-level model: the engine's view of its inputs, and its outputs."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import unpack_ids

PROMPT = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5}


def _ids(response):
    tensors = {tensor.name: tensor.data for tensor in response.outputs}
    assert tensors["output_ids"].shape == (1, 1, tensors["sequence_length"].item())
    return tensors["output_ids"].reshape(-1).tolist()


def _counting(submit):
    """Ids that depend on prompt and sequence."""
    first = int(unpack_ids(submit.prompt_ids)[0]) + 100 * submit.sequence_index
    return list(range(first, first + 50))


async def _sampling(serve, **inputs):
    """The sampling parameters that the engine gets for these inputs."""
    async with serve() as served:
        engine = await served.dial(_counting)
        await served.infer("tensorrt_llm", **{**PROMPT, **inputs})
        return SamplingParams.from_wire(engine.submits[0].sampling)


async def _error(serve, *, values=None, **inputs):
    """The error of a request that never reaches the engine."""
    async with serve(**(values or {})) as served:
        engine = await served.dial(_counting)
        with pytest.raises(RequestError) as got:
            await served.infer("tensorrt_llm", **{**PROMPT, **inputs})
        assert engine.submits == []
        return got.value


@pytest.mark.feature("input:input_ids", "output:output_ids", "output:sequence_length")
async def test_an_answer_is_the_prompt_and_the_new_ids_in_one_response(serve):
    async with serve() as served:
        await served.dial(_counting)
        (response,) = await served.infer("tensorrt_llm", **PROMPT)
        assert _ids(response) == [7, 8, 9, 7, 8, 9, 10, 11]
        assert {o.name for o in response.outputs} == {"output_ids", "sequence_length"}
        assert response.is_final


@pytest.mark.feature("input:exclude_input_in_output", "parameter:exclude_input_in_output")
@pytest.mark.parametrize(
    ("parameter", "tensor", "excludes"),
    [("${x}", None, False), ("true", None, True), ("true", False, False), ("0", True, True)],
)
async def test_the_prompt_can_be_excluded_from_the_output(serve, parameter, tensor, excludes):
    async with serve(exclude_input_in_output=parameter) as served:
        await served.dial(_counting)
        inputs = {} if tensor is None else {"exclude_input_in_output": tensor}
        (response,) = await served.infer("tensorrt_llm", **PROMPT, **inputs)
        assert _ids(response) == ([] if excludes else [7, 8, 9]) + [7, 8, 9, 10, 11]
        texts = await served.texts("ensemble", text_input="x", max_tokens=1, **inputs)
        assert texts[0].startswith("x") is not excludes


@pytest.mark.feature("input:streaming")
async def test_a_stream_gives_the_new_ids_of_each_step_and_never_the_prompt(serve):
    async with serve() as served:
        await served.dial(_counting)
        responses = await served.infer("tensorrt_llm", **PROMPT, streaming=True)
        assert [_ids(r) for r in responses] == [[7], [8], [9], [10], [11]]
        assert [r.is_final for r in responses] == [False] * 4 + [True]


@pytest.mark.feature("input:input_lengths")
async def test_input_ids_are_cut_to_their_length(serve):
    async with serve() as served:
        engine = await served.dial(_counting)
        await served.infer("tensorrt_llm", **{**PROMPT, "input_lengths": 2})
        assert unpack_ids(engine.submits[0].prompt_ids).tolist() == [7, 8]


@pytest.mark.feature("output:batch_index")
async def test_each_sample_of_a_batch_has_its_own_ids_and_parameters(serve):
    async with serve() as served:
        engine = await served.dial(_counting)
        responses = await served.infer(
            "tensorrt_llm",
            input_ids=np.array([[7, 8, 0], [20, 21, 22]], np.int32),
            input_lengths=np.array([[2], [3]], np.int32),
            request_output_len=np.array([[2], [4]], np.int32),
            temperature=np.array([[1.0], [0.5]], np.float32),
        )
        found = {o.data.item(): _ids(r) for r in responses for o in r.outputs[2:3]}
        assert found == {0: [7, 8, 7, 8], 1: [20, 21, 22, 20, 21, 22, 23]}
        assert [s.sampling.get("temperature", 1.0) for s in engine.submits] == [1.0, 0.5]
        assert [r.is_final for r in responses] == [False, True]
        assert responses[0].outputs[2].name == "batch_index"


@pytest.mark.feature("input:num_return_sequences", "output:sequence_index")
@pytest.mark.parametrize("streaming", [False, True])
async def test_each_returned_sequence_has_its_index(serve, streaming):
    async with serve() as served:
        engine = await served.dial(_counting)
        responses = await served.infer(
            "tensorrt_llm", **PROMPT, num_return_sequences=3, streaming=streaming
        )
        found: dict[int, list[int]] = {}
        for response in responses:
            tensors = {o.name: o.data for o in response.outputs}
            index = tensors["sequence_index"].item()
            found[index] = found.get(index, []) + _ids(response)
        prompt = [] if streaming else [7, 8, 9]
        assert found == {
            index: prompt + list(range(7 + 100 * index, 12 + 100 * index)) for index in range(3)
        }
        assert [s.sequence_index for s in engine.submits] == [0, 1, 2]
        assert sum(r.is_final for r in responses) == 1


@pytest.mark.feature("setting:decoupled_mode", of="request")
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            {"streaming": True},
            "Streaming is only supported if model is deployed using decoupled mode.",
        ),
        (
            {
                "input_ids": np.ones((2, 3), np.int32),
                "input_lengths": np.full((2, 1), 3, np.int32),
                "request_output_len": np.full((2, 1), 5, np.int32),
            },
            "Batch size > 1 requires the tensorrt_llm backend to be using decoupled "
            "transaction policy",
        ),
        (
            {"num_return_sequences": 2},
            "num_return_sequences is 2, which requires the decoupled transaction policy",
        ),
        ({"num_return_sequences": 0}, "num_return_sequences is 0 but must be at least 1"),
    ],
)
async def test_a_model_that_is_not_decoupled_gives_one_response(serve, inputs, text):
    error = await _error(serve, values={"decoupled_mode": "False"}, **inputs)
    assert str(error) == text


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"streaming": True}, "Streaming is only supported in decoupled mode."),
        ({"stop": True}, "A request id must be provided for request cancellation"),
    ],
)
async def test_errors_of_the_python_backend_mode_have_its_texts(serve, inputs, text):
    values = {"decoupled_mode": "False", "triton_backend": "python"}
    assert str(await _error(serve, values=values, **inputs)) == text


async def test_only_requested_outputs_are_sent_and_the_two_main_outputs_are_mandatory(serve):
    async with serve() as served:
        await served.dial(_counting)
        main = ("output_ids", "sequence_length")
        (response,) = await served.infer(
            "tensorrt_llm", **PROMPT, outputs=main, return_num_input_tokens=True
        )
        assert tuple(o.name for o in response.outputs) == main
        for lacking, present in (main, main[::-1]):
            with pytest.raises(RequestError, match=f"{lacking} tensor must be present in the"):
                await served.infer("tensorrt_llm", **PROMPT, outputs=(present,))


@pytest.mark.feature(
    "input:return_num_input_tokens",
    "input:return_num_output_tokens",
    "output:num_input_tokens",
    "output:num_output_tokens",
)
async def test_lengths_are_sent_if_requested(serve):
    async with serve() as served:
        await served.dial(_counting)
        (response,) = await served.infer(
            "tensorrt_llm",
            **PROMPT,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
        )
        values = {o.name: o.data.tolist() for o in response.outputs}
        assert values["num_input_tokens"] == [[3]]
        assert values["num_output_tokens"] == [[5]]


@pytest.mark.feature("output:cum_log_probs", "output:output_log_probs")
@pytest.mark.parametrize("streaming", [False, True])
async def test_log_probs_are_those_of_all_ids_so_far(serve, streaming):
    async with serve() as served:
        engine = await served.dial(_counting, max_per_step=3)
        engine.extras = lambda ids: {"log_probs": [-i / 10 for i in ids], "cum_log_prob": 1e9}
        responses = await served.infer(
            "tensorrt_llm", **PROMPT, streaming=streaming, return_log_probs=True
        )
        so_far: list[int] = []
        for response in responses:
            tensors = {o.name: o.data for o in response.outputs}
            so_far += _ids(response)[0 if streaming else 3 :]
            assert tensors["output_log_probs"].shape == (1, 1, len(so_far))
            np.testing.assert_allclose(
                tensors["output_log_probs"].reshape(-1), [-i / 10 for i in so_far], rtol=1e-6
            )
            total = -sum(so_far) / 10
            np.testing.assert_allclose(tensors["cum_log_probs"], [[total]], rtol=1e-6)


# ---- sampling ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, {}),
        ({"runtime_top_k": 7, "runtime_top_p": 0.5}, {"top_k": 7, "top_p": 0.5}),
        ({"runtime_top_p": 0.0}, {}),
        ({"runtime_top_p": -1.0}, {}),
        ({"temperature": 0.5, "seed": 3}, {"temperature": 0.5, "seed": 3}),
        ({"random_seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"min_length": 4}, {"min_tokens": 4}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"end_id": 2, "pad_id": 1}, {"end_id": 2, "pad_id": 1}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"beam_width": 1, "early_stopping": True, "runtime_top_p_min": 1e-6}, {}),
        ({"runtime_top_p_decay": 1.0, "runtime_top_p_reset_ids": -1}, {}),
        ({"return_log_probs": False, "return_perf_metrics": False}, {}),
        ({"len_penalty": 2.0}, {"length_penalty": 2.0}),
        ({"early_stopping": False}, {"early_stopping": 0}),
        ({"beam_search_diversity_rate": 0.5}, {"beam_search_diversity_rate": 0.5}),
        ({"runtime_min_p": 0.25}, {"min_p": 0.25}),
        ({"runtime_top_p_min": 0.5}, {"top_p_min": 0.5}),
        ({"runtime_top_p_decay": 0.5}, {"top_p_decay": 0.5}),
        ({"runtime_top_p_reset_ids": 7}, {"top_p_reset_ids": 7}),
        ({"beam_width": 2}, {"beam_width": 2, "num_return_sequences": 2}),
        (
            {"stop_words_list": np.array([[[5, 6, 9], [2, 3, -1]]], np.int32)},
            {"stop_words": ((5, 6), (9,))},
        ),
        (
            {"bad_words_list": np.array([[[5, 6, 9], [2, 3, -1]]], np.int32)},
            {"bad_words": ((5, 6), (9,))},
        ),
        ({"stop_words_list": np.zeros((1, 2, 0), np.int32)}, {}),
        ({"embedding_bias": np.zeros((1, 0), np.float32)}, {}),
        ({"embedding_bias": np.zeros((1, 600), np.float32)}, {}),
        (
            {"embedding_bias": np.pad(np.ones((1, 1), np.float32), ((0, 0), (0, 700)))},
            {"embedding_bias": np.array([1.0] + [0.0] * 599, "<f4").tobytes()},
        ),
        (
            {"embedding_bias": np.ones((1, 2), np.float32)},
            {"embedding_bias": np.array([1.0, 1.0] + [0.0] * 598, "<f4").tobytes()},
        ),
    ],
)
async def test_inputs_become_sampling_parameters(serve, inputs, expected):
    assert await _sampling(serve, **inputs) == SamplingParams(max_tokens=5, **expected)


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [
        (
            "stop_words_list",
            [[1, 2], [1, 3]],
            "must not have out-of-bound offsets: [1, 2, 1, 3]",
        ),
        ("bad_words_list", [[1, 2], [-1, 2]], "must not have additional -1s: [1, 2, -1, 2]"),
        (
            "stop_words_list",
            [[1, 2], [2, 2]],
            "must not have non-increasing offsets: [1, 2, 2, 2]",
        ),
    ],
)
async def test_a_malformed_word_list_is_refused(serve, name, words, text):
    error = await _error(serve, **{name: np.array([words], np.int32)})
    assert f"Sparse list {text}" in str(error)
    assert error.kind is ErrorKind.INVALID_ARG


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
async def test_an_expensive_word_list_is_refused(serve, name):
    words = np.array([[[5] * 65_537, range(1, 65_538)]], np.int32)
    error = await _error(serve, **{name: words})
    assert str(error) == (
        f"input '{name}' holds 65537 ids but may hold at most 65536; send fewer"
    )
    assert error.kind is ErrorKind.INVALID_ARG


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            {"input_ids": [7, 600, 9]},
            "token id 600 of input_ids is outside the vocabulary of 600",
        ),
        ({"input_ids": [7, -1, 9]}, "token id -1 of input_ids is outside the vocabulary"),
        ({"input_lengths": 4}, "input_lengths is 4 but must be between 0 and 3"),
        ({"input_lengths": -1}, "input_lengths is -1 but must be between 0 and 3"),
        ({"input_lengths": 0}, "the prompt is empty"),
        (
            {"input_ids": [1] * 257, "input_lengths": 257},
            "Prompt length (257) exceeds maximum input length (256)",
        ),
        ({"request_output_len": 0}, "'max_tokens' is 0 but must be at least 1"),
        ({"temperature": -0.5}, "'temperature' is -0.5 but must be a finite number >= 0"),
        ({"runtime_top_p": 1.5}, "'top_p' is 1.5 but must be between 0 and 1"),
        (
            {
                "prompt_embedding_table": np.zeros((1, 2, 4), np.float16),
                "input_ids": [7, 602, 9],
            },
            "token id 602 of input_ids is outside the vocabulary of 602 ids, 2 of the prompt",
        ),
        (
            {"prompt_table_extra_ids": [1, 2]},
            "prompt_table_extra_ids has 2 values, but the prompt has 3 tokens",
        ),
        (
            {"lookahead_window_size": 4},
            "lookahead_verification_set_size must be given together or not at all",
        ),
        (
            {"embedding_bias": np.ones((1, 601), np.float32)},
            "embedding_bias has 601 values, but the vocabulary has 600 ids",
        ),
    ],
)
async def test_inputs_that_cannot_be_served_are_refused_by_name_and_value(serve, inputs, text):
    assert text in str(await _error(serve, **inputs))


# ---- stop, priority, timeout ------------------------------------------------------------

STOP = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}


@pytest.mark.feature("input:stop")
@pytest.mark.parametrize("streaming", [False, True])
async def test_a_stop_by_id_ends_the_request_with_its_tokens_so_far(serve, streaming):
    async with serve() as served:
        engine = await served.dial(_counting)
        engine.gate.clear()
        task = asyncio.ensure_future(
            served.infer("tensorrt_llm", id="a", **PROMPT, streaming=streaming)
        )
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        engine.step()
        await served.processed(engine)
        (answer,) = await served.infer("tensorrt_llm", id="a", **STOP)
        assert (answer.id, answer.outputs, answer.is_final) == ("a", [], True)
        responses = await task
        assert [i for r in responses for i in _ids(r)][-2:] == [7, 8]
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


async def test_a_stop_ends_all_sequences_of_its_request_and_no_other(serve):
    async with serve() as served:
        engine = await served.dial(_counting)
        engine.gate.clear()
        stopped, kept = (
            asyncio.ensure_future(
                served.infer("tensorrt_llm", id=name, **PROMPT, num_return_sequences=2)
            )
            for name in ("a", "b")
        )
        await engine.until(lambda: len(engine.submits) == 4)
        await served.infer("tensorrt_llm", id="a", **STOP)
        assert [_ids(r) for r in await stopped] == [[7, 8, 9], [7, 8, 9]]
        engine.gate.set()
        assert [len(_ids(r)) for r in await kept] == [8, 8]


async def test_a_stop_reaches_the_requests_of_text_models(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("one two three four"))
        engine.gate.clear()
        task = asyncio.ensure_future(
            served.texts("tensorrt_llm_bls", id="a", text_input="x", max_tokens=99)
        )
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        await served.processed(engine)
        await served.infer("tensorrt_llm", id="a", **STOP)
        (text,) = await task
        assert "xone two three".startswith(text)


async def test_a_stop_of_an_unknown_id_succeeds_and_without_id_fails(serve):
    async with serve(decoupled_mode="False") as served:
        await served.dial(_counting)
        (response,) = await served.infer("tensorrt_llm", id="unknown", **STOP)
        assert response.outputs == []
        with pytest.raises(
            RequestError, match="Trying to stop a request but request ID is not"
        ):
            await served.infer("tensorrt_llm", **STOP)


async def test_closing_a_batch_cancels_all_its_samples(serve):
    async with serve() as served:
        engine = await served.dial(_counting)
        async with aclosing(
            served.stream("tensorrt_llm", **PROMPT, num_return_sequences=3, streaming=True)
        ) as responses:
            await anext(responses)
            engine.gate.clear()
        await engine.until(lambda: len(engine.cancelled) == 3)


@pytest.mark.feature("input:prompt_embedding_table", "input:prompt_table_extra_ids")
async def test_a_prompt_table_reaches_the_engine_and_separates_prefix_caches(serve):
    table = np.arange(8, dtype=np.float16).reshape(1, 2, 4)
    inputs = {**PROMPT, "input_ids": [7, 601, 9]}
    async with serve() as served:
        engine = await served.dial(_counting)
        await served.infer("tensorrt_llm", **PROMPT)
        for changes in (
            {},
            {"prompt_embedding_table": table + 1},
            {"prompt_table_extra_ids": [0, 5, 0]},
            {"prompt_table_extra_ids": [0, 5, 0], "prompt_vocab_size": 2},
            {"prompt_table_extra_ids": [0, 6, 0]},
            {"prompt_table_extra_ids": [0, 0, 0]},
        ):
            values = {**inputs, "prompt_embedding_table": table, **changes}
            await served.infer("tensorrt_llm", **values)
    plain, *asked = engine.submits
    assert plain.embeddings is None and plain.cache_salt == b""
    expected = {"dtype": "FP16", "shape": [2, 4], "data": table.tobytes()}
    assert asked[0].embeddings == expected
    assert unpack_ids(asked[0].prompt_ids).tolist() == [7, 601, 9]
    salts = [submit.cache_salt for submit in asked]
    # By the prompt table, or by the extra ids if present.
    assert salts[2] == salts[3] and salts[5] == salts[0]
    assert len({b"", *salts}) == 5


async def test_the_failure_of_a_sequence_ends_its_siblings(serve):
    async with serve() as served:
        engine = await served.dial(_counting)
        engine.gate.clear()
        engine.refusals = {np.array([9], "<i4").tobytes(): ("INTERNAL", "out of luck")}
        with pytest.raises(RequestError, match="out of luck"):
            await served.infer(
                "tensorrt_llm",
                input_ids=np.array([[8], [9]], np.int32),
                input_lengths=np.ones((2, 1), np.int32),
                request_output_len=np.ones((2, 1), np.int32),
            )
        await engine.until(lambda: engine.cancelled == [engine.submits[0].request_id])


@pytest.mark.parametrize("streaming", [False, True])
async def test_ids_without_a_batch_dimension_are_returned_without_a_batch_dimension(
    serve, streaming
):
    async with serve(triton_max_batch_size="0") as served:
        await served.dial(_counting)
        responses = await served.infer("tensorrt_llm", **PROMPT, streaming=streaming)
        ids = [i for r in responses for i in r.outputs[0].data.reshape(-1).tolist()]
        assert ids == ([] if streaming else [7, 8, 9]) + [7, 8, 9, 10, 11]
        assert all(r.outputs[0].data.ndim == 2 for r in responses)
        assert all(r.outputs[1].shape == (1,) for r in responses)
