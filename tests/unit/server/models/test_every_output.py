"""Every output of every model comes if it is requested, and only then."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.server.models.test_outputs import FIGURES
from trimaran.server.inference.tensor_bytes import from_config

# The inputs that enable an output.
ASKED_BY = {
    "cum_log_probs": {"return_log_probs": True},
    "output_log_probs": {"return_log_probs": True},
    "context_logits": {"return_context_logits": True},
    "generation_logits": {"return_generation_logits": True},
    "finish_reason": {"return_finish_reason": True},
    "num_input_tokens": {"return_num_input_tokens": True},
    "num_output_tokens": {"return_num_output_tokens": True},
    "sequence_index": {"num_return_sequences": 2},
    "batch_index": {},
    "acceptance_rate": {"return_perf_metrics": True},
    "total_accepted_draft_tokens": {"return_perf_metrics": True},
    "total_draft_tokens": {"return_perf_metrics": True},
    **{name: {"return_perf_metrics": True} for name in FIGURES},
}
TOKEN = {"output_ids": {}, "sequence_length": {}, **ASKED_BY}
TEXT = {"text_output": {}, **ASKED_BY}
REQUESTS = {
    "token": {"input_ids": [7, 8, 9], "input_lengths": 3, "request_output_len": 5},
    "text": {"text_input": "A house", "max_tokens": 5},
}
BATCHES = {
    "token": {
        "input_ids": np.array([[7], [8]], np.int32),
        "input_lengths": np.array([[1], [1]], np.int32),
        "request_output_len": np.array([[2], [2]], np.int32),
    },
    "text": {
        "text_input": np.array([[b"A"], [b"B"]], object),
        "max_tokens": np.array([[2], [2]], np.int32),
    },
}
# They belong to requests that are refused, so that no response has them.
NEVER = {"context_phase_params"}
VOCAB = 6


def models(*cases):
    """A case for each model, marked for the outputs of its kind."""
    return pytest.mark.parametrize(
        ("model", "kind", "table"),
        [
            pytest.param(
                model, kind, table,
                id=model,
                marks=pytest.mark.feature(*(f"output:{name}" for name in table), of=kind),
            )
            for model, kind, table in cases
        ],
    )  # fmt: skip


@models(
    ("tensorrt_llm", "token", TOKEN),
    ("ensemble", "text", TEXT),
    ("tensorrt_llm_bls", "text", TEXT),
)
async def test_every_output_is_sent_only_to_requests_that_ask_for_the_output(
    serve, model, kind, table
):
    async with serve() as served:
        engine = await served.dial(lambda submit: list(range(30, 80)))
        declared = {
            o.name: from_config(o.data_type) for o in served.models[model].config.output
        }
        assert declared.keys() - NEVER == table.keys()
        num_prompt = len(served.tokenizer.encode_now("A house", True)) if kind == "text" else 3
        engine.extras = _tells_all(num_prompt)
        plain = _tensors(await served.infer(model, **REQUESTS[kind]))
        assert plain.keys() == {name for name in table if name not in ASKED_BY}
        for name, asking in table.items():
            request = BATCHES[kind] if name == "batch_index" else REQUESTS[kind]
            engine.extras = _tells_all(num_prompt)
            found = _tensors(await served.infer(model, **request, **asking))
            assert name in found, name
            assert found[name].datatype == declared[name]
            assert found[name].data.size
            with_it = {other for other, what in ASKED_BY.items() if what == asking}
            assert found.keys() - plain.keys() <= with_it


def _tensors(responses):
    return {tensor.name: tensor for response in responses for tensor in response.outputs}


def _tells_all(num_prompt):
    """The messages of an engine that sends every output."""
    told = []

    def extras(ids):
        is_first = not told
        told.extend(ids)
        said = {"log_probs": [-0.5] * len(ids), "figures": FIGURES, "logits_dtype": "float32"}
        said["generation_logits"] = [np.zeros(VOCAB, np.float32).tobytes() for _ in ids]
        if is_first:
            said["context_logits"] = [np.zeros((num_prompt, VOCAB), np.float32).tobytes()]
        return said

    return extras
