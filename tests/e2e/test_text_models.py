"""The two text models side by side, with the demo model and real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from served import Served

ASKED = {"text_input": "It was a dark and", "max_tokens": 12}
OPTIONS: list[dict[str, Any]] = [
    {"exclude_input_in_output": True},
    {"top_k": 20, "seed": 3},
    {"top_k": 20, "random_seed": 3, "temperature": 0.7, "top_p": 0.9},
    {"beam_width": 3},
    {"beam_width": 2, "num_return_sequences": 2, "length_penalty": 1.5},
    {"return_log_probs": True},
    {"return_log_probs": True, "beam_width": 2},
    {"return_finish_reason": True, "end_id": 10, "min_length": 3},
    {"return_num_input_tokens": True, "return_num_output_tokens": True},
    {"stop_words": ["a ", " the"], "bad_words": [" was"]},
    {"embedding_bias_words": [" king"], "embedding_bias_weights": [5.0]},
    {"repetition_penalty": 1.5, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"top_p": 2.0},
    {"beam_width": 9},
]


def _answers(server: Served, options: dict[str, Any], model: str) -> dict[str, Any]:
    """The answer of a model, without its names."""
    _, reply = server.post(f"/v2/models/{model}/generate", {**ASKED, **options})
    own = {"model_name", "model_version", "sequence_id", "sequence_start", "sequence_end"}
    found = {name: value for name, value in reply.items() if name not in own}
    if "error" in found:
        return {"error": found["error"].replace("in ensemble 'ensemble', ", "")}
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options))
def test_ensemble_and_bls_answer_alike(decoupled_server, options):
    ensemble = _answers(decoupled_server, options, "ensemble")
    bls = _answers(decoupled_server, options, "tensorrt_llm_bls")
    assert bls.keys() == ensemble.keys()
    for name, value in ensemble.items():
        is_float = name.endswith("log_probs")
        assert bls[name] == (pytest.approx(value, abs=0.05) if is_float else value), name
