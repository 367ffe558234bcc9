"""Repositories of older versions, whose postprocessing passes the token model's outputs on."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from tests.unit.server.models.conftest import _write_repository

PASSED = {
    "cum_log_probs": ("CUM_LOG_PROBS", "TYPE_FP32", "[ -1 ]"),
    "output_log_probs": ("OUTPUT_LOG_PROBS", "TYPE_FP32", "[ -1, -1 ]"),
    "context_logits": ("CONTEXT_LOGITS", "TYPE_FP32", "[ -1, -1 ]"),
    "generation_logits": ("GENERATION_LOGITS", "TYPE_FP32", "[ -1, -1, -1 ]"),
    "batch_index": ("BATCH_INDEX", "TYPE_INT32", "[ 1 ]"),
    "sequence_index": ("SEQUENCE_INDEX", "TYPE_INT32", "[ 1 ]"),
}

NUMPY = {"TYPE_FP32": np.float32, "TYPE_INT32": np.int32}


@pytest.fixture
def older(tmp_path, tokenizer_folder):
    """The five models as they were wired then."""
    root = _write_repository(tmp_path, tokenizer_folder, {})
    post, ensemble = (root / name / "config.pbtxt" for name in ("postprocessing", "ensemble"))
    text, wires = post.read_text(), ensemble.read_text()
    marker = 'output_map {\n        key: "OUTPUT"'
    assert wires.count(marker) == 1
    for output, (name, datatype, dims) in PASSED.items():
        text += (
            f'input {{ name: "{name}" data_type: {datatype} dims: {dims} optional: true }}\n'
        )
        text += f'output {{ name: "OUT_{name}" data_type: {datatype} dims: {dims} }}\n'
        wire = f'key: "{output}"\n        value: "{output}"'
        assert wires.count(wire) == 1
        wires = wires.replace(wire, f'key: "{output}"\n        value: "_{name}"')
        wires = wires.replace(
            marker,
            f'input_map {{ key: "{name}" value: "_{name}" }}\n      '
            f'output_map {{ key: "OUT_{name}" value: "{output}" }}\n      {marker}',
        )
    post.write_text(text)
    ensemble.write_text(wires)
    return root


async def test_outputs_mapped_through_postprocessing_are_sent(serve, older, caplog):
    caplog.set_level(logging.WARNING)
    async with serve(repository=older) as served:
        engine = await served.dial(served.answer("one two"))
        engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        responses = await served.infer(
            "ensemble",
            text_input=np.array([[b"A"], [b"B"]], object),
            max_tokens=np.full((2, 1), 9, np.int32),
            return_log_probs=np.full((2, 1), True),
        )
        ids = served.tokenizer.encode_now("one two", False)
    assert len(responses) == 2
    for response in responses:
        found = {tensor.name: tensor.data for tensor in response.outputs}
        assert found.keys() == {
            "text_output", "cum_log_probs", "output_log_probs", "batch_index",
        }  # fmt: skip
        assert found["cum_log_probs"].tolist() == [[-0.5 * len(ids)]]
        assert found["output_log_probs"].tolist() == [[[-0.5] * len(ids)]]
    assert "is ignored" not in caplog.text


@pytest.mark.feature(*(f"input:{name}" for name, *_ in PASSED.values()), of="postprocessing")
async def test_postprocessing_passes_mapped_tensors_on(serve, older):
    given = {
        name: np.full([1, *(1 for _ in dims.split(","))], 3, NUMPY[datatype])
        for name, datatype, dims in PASSED.values()
    }
    async with serve(repository=older) as served:
        (response,) = await served.infer(
            "postprocessing",
            TOKENS_BATCH=np.array([[[50, 51]]], np.int32),
            SEQUENCE_LENGTH=[2],
            **given,
        )
    found = {tensor.name: tensor.data for tensor in response.outputs}
    assert found.keys() == {"OUTPUT", *(f"OUT_{name}" for name in given)}
    for name, value in given.items():
        np.testing.assert_array_equal(found[f"OUT_{name}"], value)


UNSIGNED = (
    "REQUEST_OUTPUT_LEN", "request_output_len", "max_tokens", "beam_width",
    "runtime_top_k", "top_k", "min_length", "prompt_vocab_size",
)  # fmt: skip


@pytest.fixture
def oldest(tmp_path, tokenizer_folder):
    """The models as version 0.5 declared them: counts without a sign, and no lengths."""
    root = _write_repository(tmp_path, tokenizer_folder, {})
    counts = rf'(name: "(?:{"|".join(UNSIGNED)})"\s+data_type: )TYPE_INT32'
    wires = r'\s+(?:in|out)put_map \{\s+key: "(?:SEQUENCE_LENGTH|sequence_length)"[^}]*\}'
    tensors = r',\s+\{\s+name: "(?:SEQUENCE_LENGTH|sequence_length)"[^}]*\}'
    num_counts = 0
    for path in root.glob("*/config.pbtxt"):
        text, count = re.subn(counts, r"\1TYPE_UINT32", path.read_text())
        num_counts += count
        path.write_text(re.sub(tensors, "", re.sub(wires, "", text)))
        assert "sequence_length" not in path.read_text().lower()
    assert num_counts > len(UNSIGNED)
    return root


async def test_counts_may_be_unsigned_and_lengths_unknown(serve, oldest):
    async with serve(repository=oldest) as served:
        engine = await served.dial(served.answer("one two"))
        (response,) = await served.infer(
            "ensemble", text_input="A", max_tokens=np.array([[9]], np.uint32)
        )
        assert engine.submits[-1].sampling["max_tokens"] == 9
        assert response.outputs[0].data.tolist() == [b"Aone two"]
        (response,) = await served.infer(
            "preprocessing", QUERY="A", REQUEST_OUTPUT_LEN=np.array([[9]], np.uint32)
        )
        (count,) = (o for o in response.outputs if o.name == "REQUEST_OUTPUT_LEN")
        assert (count.datatype, count.data.dtype, count.data.item()) == ("UINT32", np.uint32, 9)


async def test_a_text_without_a_length_ends_where_the_padding_begins(serve, oldest):
    async with serve(repository=oldest) as served:
        first, second = (served.tokenizer.encode_now(text, False) for text in ("a", "one two"))
        width = len(second)
        rows = [[*first, *[-1] * (width - len(first))], list(second)]
        (response,) = await served.infer(
            "postprocessing", TOKENS_BATCH=np.array([rows], np.int32)
        )
    assert response.outputs[0].data.tolist() == [b"a", b"one two"]


async def test_the_token_model_answers_without_lengths_that_it_does_not_declare(serve, oldest):
    async with serve(repository=oldest) as served:
        await served.dial(served.answer("one two"))
        (response,) = await served.infer(
            "tensorrt_llm",
            input_ids=np.array([[5]], np.int32),
            input_lengths=np.array([[1]], np.int32),
            request_output_len=np.array([[9]], np.uint32),
        )
    assert [output.name for output in response.outputs] == ["output_ids"]


@pytest.fixture
def before_decoders(tmp_path, tokenizer_folder):
    """The models as versions up to 0.10 declared them: without a decoder's text."""
    root = _write_repository(tmp_path, tokenizer_folder, {})
    tensor = r',\s+\{\s+name: "\w*decoder_\w*"(?:[^{}]|\{[^}]*\})*\}'
    wire = r'\s+(?:in|out)put_map \{\s+key: "\w*decoder_\w*"[^}]*\}'
    for path in root.glob("*/config.pbtxt"):
        text = re.sub(wire, "", path.read_text(), flags=re.IGNORECASE)
        path.write_text(re.sub(tensor, "", text, flags=re.IGNORECASE))
        assert "decoder_" not in path.read_text().lower()
    return root


async def test_preprocessing_answers_with_declared_outputs_alone(serve, before_decoders):
    async with serve(repository=before_decoders) as served:
        (response,) = await served.infer("preprocessing", QUERY="A", REQUEST_OUTPUT_LEN=9)
    assert [output.name for output in response.outputs] == [
        "INPUT_ID", "BAD_WORDS_IDS", "STOP_WORDS_IDS", "REQUEST_INPUT_LEN",
        "REQUEST_OUTPUT_LEN", "EMBEDDING_BIAS", "OUT_END_ID", "OUT_PAD_ID",
    ]  # fmt: skip


async def test_versions_up_to_0_10_pad_with_the_end_id(serve, before_decoders):
    async with serve(repository=before_decoders) as served:
        texts = np.array([[b"one two"], [b"A"]], object)
        lengths = np.full((2, 1), 9, np.int32)
        (response,) = await served.infer(
            "preprocessing", QUERY=texts, REQUEST_OUTPUT_LEN=lengths
        )
        engine = await served.dial(served.answer("one two"))
        await served.infer("ensemble", text_input="A", max_tokens=9)
        tokenizer = served.tokenizer
    found = {output.name: output.data for output in response.outputs}
    assert tokenizer.pad_id != tokenizer.end_id
    assert found["OUT_PAD_ID"].tolist() == [[tokenizer.end_id]] * 2
    assert found["INPUT_ID"][1, -1] == tokenizer.end_id
    assert engine.submits[0].sampling["pad_id"] == tokenizer.end_id


@pytest.fixture
def before_sequences(tmp_path, tokenizer_folder):
    """The models as versions up to 0.13 declared them: with a batch index alone."""
    root = _write_repository(tmp_path, tokenizer_folder, {})
    wire = r'\s+output_map \{\s+key: "sequence_index"[^}]*\}'
    tensor = r',\s+\{\s+name: "sequence_index"[^}]*\}'
    for path in root.glob("*/config.pbtxt"):
        path.write_text(re.sub(tensor, "", re.sub(wire, "", path.read_text())))
        assert "sequence_index" not in path.read_text()
    return root


@pytest.mark.parametrize("is_of_0_14", [False, True])
async def test_one_search_of_0_14_returns_all_of_its_beams(
    serve, tmp_path, tokenizer_folder, is_of_0_14
):
    root = _write_repository(tmp_path, tokenizer_folder, {})
    path = root / "tensorrt_llm" / "config.pbtxt"
    text = path.read_text()
    if is_of_0_14:
        path.write_text(text.replace('"encoder_input_features"', '"features"'))
        assert path.read_text() != text
    async with serve(repository=root) as served:
        engine = await served.dial(lambda submit: [70])
        await served.infer(
            "tensorrt_llm",
            input_ids=np.array([[5]], np.int32),
            input_lengths=1,
            request_output_len=1,
            beam_width=2,
            num_return_sequences=1,
        )
    num_beams = engine.submits[0].sampling.get("num_return_sequences", 1)
    assert num_beams == (2 if is_of_0_14 else 1)


async def test_models_up_to_0_13_answer_with_every_output_of_log_probs_and_logits(
    serve, before_sequences
):
    async with serve(repository=before_sequences) as served:
        await served.dial(served.answer("one two"))
        prompt = {"text_input": "A", "max_tokens": 9}
        for model in ("ensemble", "tensorrt_llm_bls"):
            (response,) = await served.infer(model, **prompt)
            shapes = {o.name: o.data.shape for o in response.outputs if not o.data.any()}
            num_ids = len(served.tokenizer.encode_now("A", True))
            assert shapes == {
                "batch_index": (1, 1), "cum_log_probs": (1, 1), "context_logits": (1, 1, 1),
                "output_log_probs": (1, 1, num_ids), "generation_logits": (1, 1, 1, 1),
            }  # fmt: skip
        (response,) = await served.infer("ensemble", outputs=("text_output",), **prompt)
        assert [o.name for o in response.outputs] == ["text_output"]


async def test_a_stream_of_models_up_to_0_13_has_one_id_a_response(serve, before_sequences):
    async with serve(repository=before_sequences) as served:
        engine = await served.dial(lambda submit: [70, 71, 72, 73, 74], max_per_step=5)
        engine.extras = lambda ids: {"log_probs": [float(-i) for i in ids]}
        responses = await served.infer(
            "tensorrt_llm",
            input_ids=np.array([[5]], np.int32),
            input_lengths=1,
            request_output_len=5,
            streaming=True,
            return_log_probs=True,
        )
    found = [{o.name: o.data for o in r.outputs} for r in responses]
    assert [f["output_ids"].tolist() for f in found] == [[[[70 + n]]] for n in range(5)]
    assert [f["output_log_probs"].tolist() for f in found] == [
        [[[-70.0 - m for m in range(n + 1)]]] for n in range(5)
    ]
    assert [r.is_final for r in responses] == [False] * 4 + [True]
