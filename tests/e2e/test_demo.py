"""The demo repository through the generate routes, as in the first steps of the README."""

from __future__ import annotations

import json
import urllib.request

import pytest
from served import Served

CURL_BODY = {
    "text_input": "What is machine learning?",
    "max_tokens": 20,
    "bad_words": "",
    "stop_words": "",
}
COMMON = frozenset(
    "the and of to a in that it is was he i for on with as his you be at by had not are but "
    "from or have an they which one were all her she there would their we him been has when "
    "who will no more if out so said what up its about into than them can only other".split()
)


@pytest.fixture(params=["decoupled_server", "plain_server"])
def server(request: pytest.FixtureRequest) -> Served:
    """Each claim below holds for both transaction policies."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_the_documented_curl_line_answers_in_english(server, model):
    status, reply = server.post(f"/v2/models/{model}/generate", CURL_BODY)

    assert status == 200
    assert reply["model_name"] == model
    assert reply["model_version"] == "1"
    assert reply["text_output"].startswith("What is machine learning?")
    if model == "ensemble":
        assert set(reply) == {
            "model_name", "model_version", "sequence_end", "sequence_id",
            "sequence_start", "text_output",
        }  # fmt: skip
        assert list(reply) == sorted(reply)


def test_a_long_answer_is_english_prose(server):
    body = {**CURL_BODY, "text_input": "It was a dark and", "max_tokens": 120}
    _, reply = server.post("/v2/models/ensemble/generate", body)

    words = [w.strip(".,;:!?\"'()-_").lower() for w in reply["text_output"].split()]
    assert len(words) > 40
    assert sum(word in COMMON for word in words) / len(words) > 0.3
    assert "\ufffd" not in reply["text_output"]


def test_ensemble_and_bls_give_the_same_text(server):
    replies = [
        server.post(f"/v2/models/{model}/generate", CURL_BODY)[1]["text_output"]
        for model in ("ensemble", "tensorrt_llm_bls")
    ]
    assert replies[0] == replies[1]


def test_the_prompt_can_be_excluded(server):
    _, full = server.post("/v2/models/ensemble/generate", CURL_BODY)
    _, rest = server.post(
        "/v2/models/ensemble/generate", {**CURL_BODY, "exclude_input_in_output": True}
    )
    assert full["text_output"] == CURL_BODY["text_input"] + rest["text_output"]


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_streamed_deltas_join_to_the_whole_text(decoupled_server, model):
    body = {**CURL_BODY, "max_tokens": 60, "exclude_input_in_output": True}
    _, whole = decoupled_server.post(f"/v2/models/{model}/generate", body)
    events = decoupled_server.events(
        f"/v2/models/{model}/generate_stream", {**body, "stream": True}
    )

    assert len(events) > 20
    assert "".join(event["text_output"] for event in events) == whole["text_output"]


def test_unary_infer_on_a_decoupled_model_is_refused(decoupled_server):
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["Once"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [4]},
    ]
    status, reply = decoupled_server.post("/v2/models/ensemble/infer", {"inputs": inputs})

    assert status == 501
    assert reply == {
        "error": "HTTP end point doesn't support models with decoupled transaction policy"
    }


def test_streaming_from_a_model_that_is_not_decoupled_is_refused(plain_server):
    status, reply = plain_server.post(
        "/v2/models/ensemble/generate", {**CURL_BODY, "stream": True}
    )
    assert status in (400, 500)
    assert "decoupled" in reply["error"]


def test_a_text_stop_word_ends_the_answer_at_its_position(decoupled_server):
    body = {**CURL_BODY, "max_tokens": 80, "exclude_input_in_output": True}
    _, free = decoupled_server.post("/v2/models/ensemble/generate", body)
    text = free["text_output"]
    # A piece from the middle of the text, cut without regard to words or tokens.
    stop = text[len(text) // 2 : len(text) // 2 + 7]
    end = text.index(stop) + len(stop)

    body["stop_words"] = stop
    _, stopped = decoupled_server.post("/v2/models/ensemble/generate", body)
    events = decoupled_server.events(
        "/v2/models/ensemble/generate_stream", {**body, "stream": True}
    )

    assert stopped["text_output"] == text[:end]
    assert "".join(event["text_output"] for event in events) == text[:end]


def test_metadata_config_and_index_name_the_five_models(server):
    names = {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"}
    request = urllib.request.Request(server.url("/v2/repository/index"), data=b"{}")
    with urllib.request.urlopen(request, timeout=120) as reply:
        index = json.load(reply)

    assert {entry["name"] for entry in index if entry["state"] == "READY"} == names
    for name in names:
        assert server.get(f"/v2/models/{name}")["name"] == name
        assert server.get(f"/v2/models/{name}/config")["name"] == name


def test_a_seed_fixes_a_sampled_answer(server):
    body = {**CURL_BODY, "top_p": 0.95, "temperature": 1.0, "max_tokens": 40}
    seeds = (1, 1, 2)
    texts = []
    for seed in seeds:
        status, reply = server.post(
            "/v2/models/ensemble/generate", {**body, "random_seed": seed}
        )
        assert status == 200, reply
        texts.append(reply["text_output"])
    assert texts[0] == texts[1] != texts[2]
