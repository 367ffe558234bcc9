"""Logits and figures on their way from the engine to a response of each model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.unit.server.models.conftest import FACTS, ScriptedEngine
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.direct.direct_text import DirectText
from trimaran.server.models.text_request import TextRequest, likeliest

VOCAB = 6
FIGURES = {
    "kv_cache_alloc_new_blocks": 4,
    "kv_cache_reused_blocks": 3,
    "kv_cache_alloc_total_blocks": 4,
    "arrival_time_ns": 1 << 40,
    "first_scheduled_time_ns": (1 << 40) + 1,
    "first_token_time_ns": (1 << 40) + 2,
    "last_token_time_ns": (1 << 40) + 3,
}
TOKEN = {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5}
TEXT = {"text_input": "A house", "max_tokens": 5}
MODELS = pytest.mark.parametrize(
    ("model", "inputs", "stream"),
    [
        ("tensorrt_llm", TOKEN, "streaming"),
        ("ensemble", TEXT, "stream"),
        ("tensorrt_llm_bls", TEXT, "stream"),
    ],
)


def _send_outputs(engine, num_prompt, dtype):
    """Let the engine send logits equal to the ids, and perf metrics."""
    told = []

    def extras(ids):
        told.extend(ids)
        rows = [np.full(VOCAB, i, dtype).tobytes() for i in ids]
        told_now = {"generation_logits": rows, "logits_dtype": dtype, "figures": FIGURES}
        if len(told) == len(ids):
            pieces = np.arange(num_prompt * VOCAB, dtype=dtype).reshape(num_prompt, VOCAB)
            told_now["context_logits"] = [pieces[:1].tobytes(), pieces[1:].tobytes()]
        return told_now

    engine.extras = extras
    return told


@pytest.mark.feature("setting:logits_datatype", of="request")
@pytest.mark.feature("output:context_logits", "output:generation_logits")
@MODELS
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
async def test_logits_have_the_shapes_and_the_type_of_the_config(
    serve, model, inputs, stream, is_stream, dtype
):
    datatype = {"float32": "FP32", "float16": "FP16"}[dtype]
    async with serve(logits_datatype=f"TYPE_{datatype}") as served:
        engine = await served.dial(served.answer("Hello world and more"), max_per_step=3)
        if model == "tensorrt_llm":
            num_prompt = 3
        else:
            num_prompt = len(served.tokenizer.encode_now("A house", True))
        told = _send_outputs(engine, num_prompt, dtype)
        flags = {"return_context_logits": True, "return_generation_logits": True}
        responses = await served.infer(model, **inputs, **flags, **{stream: is_stream})
        sampling = SamplingParams.from_wire(engine.submits[0].sampling)
        assert sampling.logits_dtype == dtype
        assert sampling.return_context_logits and sampling.return_generation_logits

    context = np.arange(num_prompt * VOCAB).reshape(1, num_prompt, VOCAB)
    found = []
    for response in responses:
        tensors = {tensor.name: tensor for tensor in response.outputs}
        assert tensors["generation_logits"].datatype == datatype
        logits = tensors["generation_logits"].data
        assert logits.shape == (
            (1, logits.shape[1], 1, VOCAB) if is_stream else (1, 1, len(told), VOCAB)
        )
        found += logits[..., 0].reshape(-1).tolist()
        # Clients of streams read the prompt's logits of any response.
        assert tensors["context_logits"].datatype == datatype
        np.testing.assert_array_equal(tensors["context_logits"].data, context)
    assert found == told


@MODELS
@pytest.mark.parametrize("is_stream", [False, True])
async def test_perf_metrics_are_sent_with_each_response_if_requested(
    serve, model, inputs, stream, is_stream
):
    async with serve() as served:
        engine = await served.dial(served.answer("Hello world and more"))
        _send_outputs(engine, 3, "float32")
        silent = await served.infer(model, **inputs, **{stream: is_stream})
        told = await served.infer(
            model, **inputs, return_perf_metrics=True, **{stream: is_stream}
        )
    names = {tensor.name for response in silent for tensor in response.outputs}
    assert names <= {"output_ids", "sequence_length", "text_output"}
    drafted = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    for response in told:
        tensors = {tensor.name: tensor for tensor in response.outputs}
        for name, value in {**FIGURES, **dict.fromkeys(drafted, 0)}.items():
            tensor = tensors[name]
            assert tensor.data.tolist() == [[value]]
            is_time = name.endswith("_ns")
            is_rate = name == "acceptance_rate"
            assert tensor.datatype == ("INT64" if is_time else "FP32" if is_rate else "INT32")


@pytest.mark.feature("input:return_finish_reason", "output:finish_reason")
@MODELS
@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_finish_reason_is_sent_with_the_last_response_if_requested(
    serve, model, inputs, stream, is_stream
):
    asked = {**inputs, "return_finish_reason": True, stream: is_stream}
    async with serve() as served:
        await served.dial(served.answer("Hello world and more"))
        responses = await served.infer(model, **asked)
        silent = await served.infer(model, **inputs)
        found = [
            [tensor.data.tolist() for tensor in r.outputs if tensor.name == "finish_reason"]
            for r in responses
        ]
        assert found == [[]] * (len(responses) - 1) + [[[[b"length"]]]]
        assert "finish_reason" not in {tensor.name for tensor in silent[0].outputs}
        if stream == "stream":
            (response,) = await served.infer(
                model,
                **{**inputs, "max_tokens": 20},
                return_finish_reason=True,
                stop_words=["wor"],
            )
            reasons = [t.data.item() for t in response.outputs if t.name == "finish_reason"]
            assert reasons == [b"stop"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_text_models_pass_prompt_tables_on(serve, model):
    table = np.ones((1, 2, 4), np.float16)
    async with serve() as served:
        engine = await served.dial(served.answer("Hello"))
        extra = {"prompt_vocab_size": 2, "prompt_table_extra_id": 3}
        await served.infer(model, **TEXT, prompt_embedding_table=table, **extra)
        await served.infer(model, **TEXT)
    asked, plain = engine.submits
    assert asked.embeddings == {"dtype": "FP16", "shape": [2, 4], "data": table.tobytes()}
    # No word of a text has an id of the table: its prompt is known by the table alone.
    assert asked.cache_salt and not plain.cache_salt
    assert plain.embeddings is None


@pytest.mark.parametrize(
    ("values", "is_refused"),
    [
        ({"return_context_logits": True}, True),
        ({"return_generation_logits": True}, True),
        ({"return_generation_logits": True, "streaming": True}, False),
        ({"return_generation_logits": True, "request_output_len": 60}, False),
        ({"return_log_probs": True}, False),
    ],
)
async def test_logits_too_large_for_a_response_are_refused(serve, values, is_refused):
    facts = {**FACTS, "vocab_size": 5 << 20, "max_input_len": 200}
    inputs = {**TOKEN, "input_ids": [1] * 110, "input_lengths": 110, "request_output_len": 400}
    async with serve() as served:
        engine = ScriptedEngine(lambda submit: [1, 2])
        served.dialled.append(engine)
        await engine.dial(served.config.engine_listen[-1], served.hello(facts=facts))
        asking = served.infer("tensorrt_llm", **{**inputs, **values})
        if is_refused:
            with pytest.raises(
                RequestError, match=r"logits of \d+ tokens over 5242880 ids are"
            ):
                await asking
        else:
            await asking
    assert len(engine.submits) == (not is_refused)


async def test_a_text_stop_word_keeps_the_perf_metrics(serve):
    async with serve() as served:
        engine = await served.dial(served.answer("Hello world and more"))
        _send_outputs(engine, 3, "float32")
        (response,) = await served.infer(
            "ensemble",
            **{**TEXT, "max_tokens": 20},
            return_perf_metrics=True,
            stop_words=["wor"],
        )
    tensors = {tensor.name: tensor.data for tensor in response.outputs}
    assert tensors["text_output"].item() == b"A houseHello wor"
    assert tensors["last_token_time_ns"].item() == FIGURES["last_token_time_ns"]


@pytest.mark.parametrize(
    "asked", [{}, {"return_finish_reason": True}, {"return_perf_metrics": True}]
)
async def test_a_stopped_stream_ends_with_the_requested_final_outputs(serve, asked):
    async with serve() as served:
        engine = await served.dial(lambda submit: list(range(50)))
        engine.gate.clear()
        stream = served.stream("tensorrt_llm", id="a", **TOKEN, streaming=True, **asked)
        first = asyncio.ensure_future(anext(stream))
        await engine.until(lambda: len(engine.submits) == 1)
        engine.step()
        await first
        await served.infer("tensorrt_llm", id="a", **TOKEN, stop=True)
        rest = [response async for response in stream]
        assert len(rest) == len(asked)
        if asked:
            outputs = {tensor.name: tensor.data.tolist() for tensor in rest[0].outputs}
            assert (outputs["output_ids"], outputs["sequence_length"]) == ([[[]]], [[0]])
            reason = outputs.get("finish_reason", [[b"cancelled"]])
            assert (reason, rest[0].is_final) == ([[b"cancelled"]], True)
            assert ("last_token_time_ns" in outputs) == ("return_perf_metrics" in asked)


@MODELS
async def test_each_sample_of_a_batch_gets_its_requested_outputs(serve, model, inputs, stream):
    del stream
    batch = {name: np.array([[value]] * 2) for name, value in inputs.items()}
    if model == "tensorrt_llm":
        batch = {name: array.reshape(2, -1).astype(np.int32) for name, array in batch.items()}
    else:
        batch["text_input"] = np.array([[b"A house"]] * 2, object)
        batch["max_tokens"] = np.array([[5], [5]], np.int32)
    async with serve() as served:
        engine = await served.dial(served.answer("Hello world and more"))
        engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        responses = await served.infer(
            model,
            **batch,
            return_log_probs=np.array([[False], [True]]),
            return_finish_reason=np.array([[True], [False]]),
            exclude_input_in_output=np.array([[False], [True]]),
        )
    told = [{tensor.name: tensor.data for tensor in r.outputs} for r in responses]
    first, second = sorted(told, key=lambda tensors: tensors["batch_index"].item())
    assert ("finish_reason" in first, "finish_reason" in second) == (True, False)
    assert "cum_log_probs" not in first
    assert second["cum_log_probs"].item() == -0.5 * 5
    if model == "tensorrt_llm":
        lengths = [tensors["sequence_length"].item() for tensors in (first, second)]
        assert lengths == [len(inputs["input_ids"]) + 5, 5]
    else:
        whole, new = first["text_output"].item(), second["text_output"].item()
        assert whole == b"A house" + new


LOGITS_LIMIT = 40_000
"""Less than the logits of two answers of six tokens."""


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_logits_of_answers_that_wait_for_a_stop_word_are_kept_within_the_limit(
    serve, model
):
    """Their ids come one by one, because a stop word may end them."""
    async with serve({"max_unread_logits_bytes": LOGITS_LIMIT}) as served:
        engine = await served.dial(lambda submit: [7] * 12)
        row = np.arange(600, dtype=np.float32).tobytes()
        engine.extras = lambda ids: {
            "generation_logits": [row] * len(ids), "logits_dtype": "float32",
        }  # fmt: skip
        asked = {
            "text_input": "x", "max_tokens": 12, "end_id": -1, "stop_words": "never said",
            "return_generation_logits": True,
        }  # fmt: skip
        both = await asyncio.gather(
            served.infer(model, **asked), served.infer(model, **asked), return_exceptions=True
        )
        ended = [each for each in both if isinstance(each, RequestError)]
        assert len(ended) == 1 and "--max-unread-logits-bytes" in str(ended[0])
        assert served.engines.unread_logits.num_whole_bytes == 0

        (alone,) = await served.infer(model, **asked)
        logits = {each.name: each.data for each in alone.outputs}["generation_logits"]
        assert logits.shape[-2:] == (12, 600)
        assert (logits == np.arange(600)).all()
        assert served.engines.unread_logits.num_whole_bytes == 0


async def test_likeliest_ids_take_the_place_of_logits_that_would_be_kept(serve):
    """The logits of such answers do not add up."""
    async with serve({"max_unread_logits_bytes": LOGITS_LIMIT}) as served:
        engine = await served.dial(lambda submit: [7] * 60)
        row = np.arange(600, dtype=np.float32).tobytes()
        engine.extras = lambda ids: {
            "generation_logits": [row] * len(ids), "log_probs": [-0.5] * len(ids),
            "logits_dtype": "float32",
        }  # fmt: skip
        model = served.models["ensemble"]
        pipeline = DirectText.of(model).reader.pipeline
        wanted = [
            TextRequest(
                model_name="", prompts=["x"], max_tokens=60, ignores_end=True, num_top=2,
                sampling={"return_log_probs": True, "return_generation_logits": True},
            )
            for _ in range(2)
        ]  # fmt: skip

        async def whole(request):
            return [chunk async for chunk in model.infer(pipeline.adopt(request))]

        # No faster than the front end reads.
        engine.gate.clear()
        both = asyncio.gather(*map(whole, wanted))
        await engine.until(lambda: len(engine.submits) == 2)
        while not both.done():
            engine.step()
            await served.processed(engine)
            await asyncio.sleep(0.002)
        for (chunk,) in await both:
            assert [[token_id for token_id, _ in top] for top in chunk.tops] == [
                [599, 598]
            ] * 59
            assert chunk.logits.shape == (1, 600)


def test_the_likeliest_ids_of_a_place_are_ranked_and_take_eight_bytes_each():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(40, 90)).astype(np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for top, row in zip(likeliest(logits, 20), exact, strict=True):
        ids = [token_id for token_id, _ in top]
        assert ids == np.argsort(-row)[:20].tolist()
        np.testing.assert_allclose([each for _, each in top], row[ids], rtol=1e-5, atol=1e-6)
        assert len(top) == 20 and len(top.pairs) == 160
    assert [len(top) for top in likeliest(logits[:2, :3], 20)] == [3, 3]
