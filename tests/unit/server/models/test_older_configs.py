"""Repositories of older versions, whose postprocessing passes the token model's outputs on."""

from __future__ import annotations

import logging

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


async def test_what_went_through_postprocessing_comes(serve, older, caplog):
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
async def test_postprocessing_alone_passes_them_on(serve, older):
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
