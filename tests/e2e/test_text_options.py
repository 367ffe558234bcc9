"""The effects of text options on the text, with the demo model and real ranks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from served import Served

PROMPT = "It was a dark and"
GREEDY = {"text_input": PROMPT, "max_tokens": 24, "exclude_input_in_output": True}
SAMPLED = {**GREEDY, "top_k": 50, "temperature": 0.9}


def _reply(server: Served, body: dict[str, Any], model: str = "ensemble") -> dict[str, Any]:
    status, reply = server.post(f"/v2/models/{model}/generate", body)
    assert status == 200, reply
    return reply


def _text(server: Served, body: dict[str, Any], model: str = "ensemble") -> str:
    return str(_reply(server, body, model)["text_output"])


def _events(server: Served, body: dict[str, Any], model: str = "ensemble") -> list[Any]:
    return server.events(f"/v2/models/{model}/generate_stream", {**body, "stream": True})


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("position", [3, 11])
def test_text_ends_with_its_stop_word(decoupled_server, model, position):
    whole = _text(decoupled_server, GREEDY)
    # A word that begins and ends inside other words.
    word = whole[position : position + 9]
    body = {**GREEDY, "stop_words": ["never there", word]}
    expected = whole[: whole.index(word) + len(word)]
    assert _text(decoupled_server, body, model) == expected
    deltas = [event["text_output"] for event in _events(decoupled_server, body, model)]
    assert "".join(deltas) == expected


def test_a_bad_word_is_never_generated(decoupled_server):
    word = " " + _text(decoupled_server, GREEDY).split()[0]
    text = _text(decoupled_server, {**GREEDY, "bad_words": [word, word.strip()]})
    assert not text.startswith(word)


def test_a_word_with_a_large_bias_is_the_next_word(decoupled_server):
    body = {
        **GREEDY, "max_tokens": 1,
        "embedding_bias_words": [" sea"], "embedding_bias_weights": [100.0],
    }  # fmt: skip
    assert _text(decoupled_server, body) in " sea"
    assert _text(decoupled_server, {**body, "embedding_bias_weights": [-100.0]}) not in " sea"


def test_a_seed_determines_a_sample(decoupled_server):
    texts = [_text(decoupled_server, {**SAMPLED, "seed": seed}) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_temperature_zero_and_top_k_one_are_greedy(decoupled_server):
    greedy = _text(decoupled_server, GREEDY)
    assert _text(decoupled_server, {**SAMPLED, "temperature": 0.0}) == greedy
    assert _text(decoupled_server, {**SAMPLED, "top_k": 1}) == greedy


def test_returned_sequences_differ_and_carry_their_index(decoupled_server):
    found: dict[int, str] = {}
    for event in _events(decoupled_server, {**SAMPLED, "num_return_sequences": 3}):
        index = event["sequence_index"]
        found[index] = found.get(index, "") + event["text_output"]
    assert sorted(found) == [0, 1, 2]
    assert len(set(found.values())) == 3


def test_a_batch_of_texts_gets_the_answers_of_single_texts(decoupled_server):
    prompts = [PROMPT, "The ship", "She said that he"]
    alone = [_text(decoupled_server, {**GREEDY, "text_input": text}) for text in prompts]
    body = {
        "text_input": prompts,
        "max_tokens": [24, 24, 24],
        "exclude_input_in_output": [True, True, True],
    }
    events = decoupled_server.events("/v2/models/ensemble/generate_stream", body)
    assert {event["batch_index"]: event["text_output"] for event in events} == dict(
        enumerate(alone)
    )


def test_log_probs_add_up_and_do_not_depend_on_streaming(decoupled_server):
    body = {**GREEDY, "return_log_probs": True, "return_num_output_tokens": True}
    reply = _reply(decoupled_server, body)
    each = reply["output_log_probs"]
    assert len(each) == reply["num_output_tokens"] == 24
    assert max(each) <= 0
    assert reply["cum_log_probs"] == pytest.approx(sum(each), rel=1e-4)

    for event in _events(decoupled_server, body):
        so_far = event["output_log_probs"]
        so_far = so_far if isinstance(so_far, list) else [so_far]
        assert so_far == pytest.approx(each[: event["num_output_tokens"]], abs=0.05)
    assert len(so_far) == len(each)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_beams_are_at_least_as_likely_as_greedy_output(decoupled_server, model):
    body = {**GREEDY, "return_log_probs": True}
    greedy = _reply(decoupled_server, body, model)
    beams = {**body, "beam_width": 4}
    reply = _reply(decoupled_server, beams, model)
    assert len(set(reply["text_output"])) == 4
    assert reply["cum_log_probs"] == sorted(reply["cum_log_probs"], reverse=True)
    assert reply["cum_log_probs"][0] > greedy["cum_log_probs"] - 0.05
    last = _events(decoupled_server, beams, model)[-1]
    assert last["text_output"] == reply["text_output"]
    fewer = _reply(decoupled_server, {**beams, "num_return_sequences": 2}, model)
    assert fewer["text_output"] == reply["text_output"][:2]


SCHEMA = {
    "type": "object",
    "properties": {"ship": {"enum": ["brig", "sloop"]}, "guns": {"enum": [8, 64]}},
    "required": ["ship", "guns"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_a_text_follows_its_guide(decoupled_server, model):
    def asked(kind, guide):
        guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
        # A schema allows white space, of which a small model finds no end.
        return {**SAMPLED, "max_tokens": 120, "seed": 3, "frequency_penalty": 0.7, **guided}

    ship = asked("json_schema", json.dumps(SCHEMA))
    text = _text(decoupled_server, ship, model)
    told = json.loads(text)
    assert told["ship"] in ("brig", "sloop") and told["guns"] in (8, 64)
    assert "".join(e["text_output"] for e in _events(decoupled_server, ship, model)) == text
    chosen = _text(decoupled_server, asked("choice", '[" red", " green"]'), model)
    assert chosen in (" red", " green")
    number = _text(decoupled_server, asked("regex", "[0-9]{3}-[a-c]{2}"), model)
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", number)


def test_a_repetition_penalty_changes_a_text_that_repeats(decoupled_server):
    body = {**GREEDY, "max_tokens": 150}
    words = _text(decoupled_server, body).split()
    penalised = _text(decoupled_server, {**body, "repetition_penalty": 1.5}).split()
    assert len(set(penalised)) / len(penalised) > len(set(words)) / len(words)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"beam_width": 5}, "beam_width is 5 but this engine serves at most 4"),
        ({"lora_task_id": 5}, "LoRA task 5 not found in cache. Please send LoRA weights with"),
        ({"lora_name": "french"}, "no LoRA adapter is named 'french'; known names: 81, north"),
        (
            {"guided_decoding_guide_type": "xml", "guided_decoding_guide": "<a/>"},
            "guided_decoding_guide_type is 'xml' but must be one of json, json_schema, regex",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(a"},
            "guided_decoding_guide is no regex that can be followed",
        ),
        ({"temperature": -1.0}, "'temperature' is -1.0 but must be a finite number >= 0"),
        ({"text_input": "word " * 2000}, "exceeds maximum input length (896)"),
    ],
)
def test_inputs_that_are_not_served_are_refused_by_name_and_value(
    decoupled_server, option, text
):
    status, reply = decoupled_server.post("/v2/models/ensemble/generate", {**GREEDY, **option})
    assert status == 400
    assert reply["error"].startswith("in ensemble 'ensemble', ")
    assert text in reply["error"]
