"""The repository without in-flight batching: one response answers all samples of a request."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.unit.server.models.conftest import _write_repository

TOKEN = """
name: "tensorrt_llm"
backend: "python"
max_batch_size: 4
input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }
input { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } }
input { name: "request_output_len" data_type: TYPE_UINT32 dims: [ -1 ] }
input { name: "end_id" data_type: TYPE_UINT32 dims: [ 1 ] reshape: { shape: [ ] } }
input { name: "pad_id" data_type: TYPE_UINT32 dims: [ 1 ] reshape: { shape: [ ] } }
input { name: "beam_width" data_type: TYPE_UINT32 dims: [ 1 ] reshape: { shape: [ ] }
        optional: true }
input { name: "output_log_probs" data_type: TYPE_BOOL dims: [ 1 ] reshape: { shape: [ ] }
        optional: true }
output { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] }
output { name: "log_probs" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "cum_log_probs" data_type: TYPE_FP32 dims: [ -1 ] }
parameters { key: "engine_dir" value: { string_value: "/engine" } }
"""
ENSEMBLE = """
name: "ensemble"
platform: "ensemble"
max_batch_size: 4
input { name: "text_input" data_type: TYPE_STRING dims: [ -1 ] }
input { name: "max_tokens" data_type: TYPE_UINT32 dims: [ -1 ] }
input { name: "end_id" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }
input { name: "pad_id" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }
input { name: "output_log_probs" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [ -1, -1 ] }
ensemble_scheduling {
  step [
    { model_name: "preprocessing" model_version: -1
      input_map { key: "QUERY" value: "text_input" }
      input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }
      output_map { key: "REQUEST_INPUT_LEN" value: "_LEN" }
      output_map { key: "INPUT_ID" value: "_IDS" }
      output_map { key: "REQUEST_OUTPUT_LEN" value: "_NEW" } },
    { model_name: "tensorrt_llm" model_version: -1
      input_map { key: "input_ids" value: "_IDS" }
      input_map { key: "input_lengths" value: "_LEN" }
      input_map { key: "request_output_len" value: "_NEW" }
      input_map { key: "end_id" value: "end_id" }
      input_map { key: "pad_id" value: "pad_id" }
      input_map { key: "output_log_probs" value: "output_log_probs" }
      output_map { key: "output_ids" value: "_OUT" } },
    { model_name: "postprocessing" model_version: -1
      input_map { key: "TOKENS_BATCH" value: "_OUT" }
      output_map { key: "OUTPUT" value: "text_output" } }
  ]
}
"""
COUNT = r'(name: "REQUEST_OUTPUT_LEN"\s+data_type: )TYPE_INT32'
LENGTH = r',\s+\{\s+name: "SEQUENCE_LENGTH"[^}]*\}'
END = 1


@pytest.fixture
def repository(tmp_path, tokenizer_folder):
    """The four models of a repository without in-flight batching."""
    root = _write_repository(tmp_path, tokenizer_folder, {})
    for path in (root / "tensorrt_llm_bls").rglob("*"):
        if path.is_file():
            path.unlink()
    (root / "tensorrt_llm" / "config.pbtxt").write_text(TOKEN)
    (root / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    before, after = root / "preprocessing/config.pbtxt", root / "postprocessing/config.pbtxt"
    before.write_text(re.sub(COUNT, r"\1TYPE_UINT32", before.read_text()))
    after.write_text(re.sub(LENGTH, "", after.read_text()))
    return root


def column(*values, dtype=np.uint32):
    return np.array([[value] for value in values], dtype)


def two_prompts(**besides):
    return {
        "input_ids": np.array([[50, 51, 52], [60, 2, 2]], np.int32),
        "input_lengths": column(3, 1, dtype=np.int32),
        "request_output_len": column(4, 4),
        "end_id": column(END, END),
        "pad_id": column(2, 2),
        **besides,
    }


async def test_a_batch_has_one_response_filled_up_with_the_end_id(serve, repository):
    async with serve(repository=repository) as served:
        # Two ids for the prompt that begins with 50, three for the other.
        await served.dial(lambda s: [70, 71] if s.prompt_ids[0] == 50 else [80, 81, 82])
        (response,) = await served.infer("tensorrt_llm", **two_prompts())
    (ids,) = response.outputs
    assert (ids.name, ids.data.shape) == ("output_ids", (2, 1, 7))
    assert ids.data[0, 0].tolist() == [50, 51, 52, 70, 71, END, END]
    assert ids.data[1, 0].tolist() == [60, 80, 81, 82, END, END, END]


async def test_log_probs_come_by_sample_place_and_beam_when_asked_for(serve, repository):
    async with serve(repository=repository) as served:
        engine = await served.dial(lambda submit: [70, 71])
        engine.extras = lambda ids: {"log_probs": [-0.5] * len(ids)}
        (response,) = await served.infer(
            "tensorrt_llm", **two_prompts(output_log_probs=column(True, True, dtype=bool))
        )
        assert all(submit.sampling["return_log_probs"] for submit in engine.submits)
    found = {tensor.name: tensor.data for tensor in response.outputs}
    assert found.keys() == {"output_ids", "log_probs", "cum_log_probs"}
    assert found["log_probs"].shape == (2, 4, 1)
    assert found["log_probs"][:, :, 0].tolist() == [[-0.5, -0.5, 0, 0]] * 2
    assert found["cum_log_probs"].tolist() == [[-1.0]] * 2


async def test_more_new_ids_than_a_sequence_has_places_are_not_filled_up(serve, repository):
    async with serve(repository=repository) as served:
        await served.dial(lambda submit: [70])
        inputs = two_prompts(request_output_len=column(2**31 - 1, 5))
        (response,) = await served.infer("tensorrt_llm", **inputs)
    # The prompt of 3 ids leaves 509 of 512 places.
    assert response.outputs[0].data.shape == (2, 1, 3 + 509)


async def test_the_ensemble_answers_a_batch_with_one_text_a_sample(serve, repository):
    async with serve(repository=repository) as served:
        await served.dial(served.answer("one two"))
        (response,) = await served.infer(
            "ensemble",
            text_input=column(b"A", b"B b", dtype=object),
            max_tokens=column(9, 9),
            end_id=column(END, END),
            pad_id=column(2, 2),
        )
    assert response.outputs[0].data.tolist() == [b"Aone two", b"B bone two"]


async def test_ids_outside_the_vocabulary_are_refused_or_clamped(serve, repository):
    inputs = two_prompts(input_ids=np.array([[2**31 - 1, 51, -7], [600, 2, 2]], np.int32))
    async with serve(repository=repository) as served:
        await served.dial(lambda submit: [70])
        with pytest.raises(Exception, match="outside the vocabulary of 600 ids"):
            await served.infer("tensorrt_llm", **inputs)
        two = two_prompts(end_id=column(50256, 50256))
        with pytest.raises(Exception, match="'end_id' is 50256 but must be below"):
            await served.infer("tensorrt_llm", **two)
    async with serve({"clamps_ids": True}, repository=repository) as served:
        engine = await served.dial(lambda submit: [70])
        await served.infer("tensorrt_llm", **{**inputs, "end_id": column(50256, 599)})
        assert [submit.sampling.get("end_id") for submit in engine.submits] == [None, 599]
        await served.infer("tensorrt_llm", **{**inputs, "input_lengths": column(2, 9)})
        prompts = [np.frombuffer(s.prompt_ids, "<i4").tolist() for s in engine.submits]
    assert prompts == [[599, 51, 0], [599], [599, 51], [599, 2, 2]]
