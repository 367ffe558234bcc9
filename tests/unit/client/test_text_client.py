"""`trimaran client text`: prompts out, texts regrouped."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scripted_server import Reply, text_reply


@pytest.fixture
def call(server, trimaran):
    """Send a prompt with more flags."""

    def run(prompt, *flags):
        return trimaran("client", "text", "-u", server.url, "-p", prompt, *flags)

    return run


def echo(request):
    """Answers the prompt with itself and an ending."""
    return [text_reply(request.inputs["text_input"].flat[0].decode() + " end", is_final=True)]


def test_one_prompt_is_one_request_and_its_text_is_printed(server, call):
    server.script = echo

    assert call("Hello", "-o", "7") == (0, "Hello end\n", "")

    (request,) = server.received
    assert request.model == "ensemble"
    values = {name: array.tolist() for name, array in request.inputs.items()}
    assert values == {
        "text_input": [[b"Hello"]], "max_tokens": [[7]], "stream": [[False]],
        "beam_width": [[1]], "temperature": [[1.0]],
    }  # fmt: skip


def test_each_prompt_of_a_json_list_is_a_request(server, call):
    server.script = echo

    code, out, _ = call('["a", "b"]')

    assert (code, out) == (0, "a end\nb end\n")
    assert [request.inputs["text_input"].shape for request in server.received] == [(1, 1)] * 2


@pytest.mark.parametrize("prompt", ["[1, 2]", "17", '{"a": 1}', "[not json"])
def test_other_json_is_a_prompt(server, call, prompt):
    server.script = echo

    assert call(prompt)[1] == f"{prompt} end\n"


def test_a_batch_is_one_request_whose_responses_are_regrouped(server, call):
    server.script = lambda request: [
        text_reply(" of", batch_index=("INT32", [[1]])),
        text_reply("A", batch_index=("INT32", [[0]])),
        text_reply(" b", batch_index=("INT32", [[1]])),
        text_reply(" a", batch_index=("INT32", [[0]]), is_final=True),
    ]

    code, out, _ = call('["p", "q"]', "--batch-inputs", "-S", "--stop-words", "x", "yz")

    assert (code, out) == (0, "batch 0: A a\nbatch 1:  of b\n")
    (request,) = server.received
    assert request.inputs["text_input"].tolist() == [[b"p"], [b"q"]]
    assert request.inputs["max_tokens"].tolist() == [[100], [100]]
    assert request.inputs["stop_words"].tolist() == [[b"x", b"yz"], [b"x", b"yz"]]


def test_a_batch_is_a_request_a_prompt_where_responses_name_no_prompt(server, call):
    server.output_names = ("text_output",)
    server.script = lambda request: [
        text_reply(request.inputs["text_input"].item().decode() + "!", is_final=True)
    ]

    code, out, err = call('["p", "q", "r"]', "--batch-inputs")

    assert (code, out) == (0, "p!\nq!\nr!\n")
    assert "has no output batch_index" in err
    assert len(server.received) == 3


def test_text_of_a_stream_is_appended_or_overwritten(server, call):
    server.script = lambda request: [
        text_reply("One"), text_reply(" two"), Reply(is_final=True),
    ]  # fmt: skip
    assert call("p", "-S")[1] == "One two\n"

    server.script = lambda request: [
        text_reply("One"), text_reply("One two"), Reply(is_final=True),
    ]  # fmt: skip
    assert call("p", "-S", "--overwrite-output-text")[1] == "One two\n"


def test_beams_and_sequences_have_lines_of_their_own(server, call):
    server.script = lambda request: [text_reply("x", "y", is_final=True)]
    assert call("p", "-b", "2")[1] == "beam 0: x\nbeam 1: y\n"

    server.script = lambda request: [
        text_reply("s", sequence_index=("INT32", [[1]])),
        text_reply("f", sequence_index=("INT32", [[0]]), is_final=True),
    ]
    assert call("p", "-n", "2")[1] == "sequence 0: f\nsequence 1: s\n"


def test_flags_become_tensors_of_their_type(server, call):
    call(
        "p", "--model-name", "tensorrt_llm_bls", "--top-k", "3", "--seed", "5",
        "--bad-words", "b", "--embedding-bias-words", "u", "v",
        "--embedding-bias-weights", "1.5", "-2", "--request-id", "id7", "--return-log-probs",
    )  # fmt: skip

    (request,) = server.received
    assert (request.model, request.id) == ("tensorrt_llm_bls", "id7")
    values = {name: array.tolist() for name, array in request.inputs.items()}
    assert values["top_k"] == [[3]]
    assert values["seed"] == [[5]]
    assert values["bad_words"] == [[b"b"]]
    assert values["embedding_bias_words"] == [[b"u", b"v"]]
    assert values["embedding_bias_weights"] == [[1.5, -2.0]]
    assert values["return_log_probs"] == [[True]]


@pytest.mark.parametrize("config", ["model.lora_config.npy", "model.lora_keys.npy"])
def test_an_adapter_is_sent_with_each_prompt(server, call, tmp_path, config):
    server.script = lambda request: [text_reply("x", is_final=True)]
    weights = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    np.save(tmp_path / "model.lora_weights.npy", weights)
    np.save(tmp_path / config, [[[1, 0, 1], [3, 0, 1]]])

    call('["p", "q"]', "--batch-inputs", "--lora-path", str(tmp_path), "--lora-task-id", "7")
    call("p", "--lora-name", "north")

    call("p", "--lora-path", str(tmp_path))
    call("p", "--lora-path", str(tmp_path))

    brought, named, *without_ids = (request.inputs for request in server.received)
    # The same weights have the same id, so that the server keeps them once.
    (task_id,) = {inputs["lora_task_id"].item() for inputs in without_ids}
    assert task_id > 0
    assert all(inputs["lora_weights"].tolist() == weights.tolist() for inputs in without_ids)
    assert brought["lora_task_id"].tolist() == [[7], [7]]
    assert brought["lora_weights"].dtype == np.float16
    assert brought["lora_weights"].tolist() == weights.tolist() * 2
    assert brought["lora_config"].tolist() == [[[1, 0, 1], [3, 0, 1]]] * 2
    assert named["lora_name"].tolist() == [[b"north"]]
    assert "lora_task_id" not in named


@pytest.mark.parametrize(
    ("dtype", "number", "sent"),
    # The scripted server shows bfloat16 as bits.
    [("float32", 70000.1, np.float32(70000.1)), ("bfloat16", 3e38, np.uint16(0x7F62))],
)
def test_an_adapter_is_sent_in_the_declared_dtype(server, call, tmp_path, dtype, number, sent):
    server.script = lambda request: [text_reply("x", is_final=True)]
    np.save(tmp_path / "model.lora_weights.npy", np.full((1, 1, 2), number, np.float32))
    np.save(tmp_path / "model.lora_config.npy", [[[1, 0, 1]]])
    flags = ("--lora-path", str(tmp_path), "--lora-task-id", "7", "--dtype", dtype)

    assert call("p", *flags)[0] == 0

    (request,) = server.received
    assert request.inputs["lora_weights"].dtype == sent.dtype
    assert request.inputs["lora_weights"].tolist() == [[[sent, sent]]]


def test_expected_texts_are_compared(server, call):
    server.script = echo
    prompts, texts = json.dumps(["a", "b"]), json.dumps(["a end", "b end"])

    assert call(prompts, "--check-outputs", "--expected-outputs", texts)[0] == 0
    code, _, err = call("a", "--check-outputs", "--expected-outputs", "other")

    assert code == 1
    assert "prompt 0: the server's text is not the expected one" in err
    assert "expected: 'other'" in err
    assert "received: 'a end'" in err


@pytest.mark.parametrize(
    "url", ["localhost", "http://localhost:8001", "localhost:grpc", "::1:8001", "[::1]"]
)
def test_a_url_without_a_port_is_refused(trimaran, url):
    code, _, err = trimaran("client", "text", "-u", url, "-p", "Hello")
    assert code == 2
    assert f"--url is '{url}' but must be HOST:PORT, as in localhost:8001" in err


def test_an_invalid_port_is_refused_and_reaches_no_server(server, trimaran):
    url = f"127.0.0.1:{server.port + 65536}"

    code, _, err = trimaran("client", "text", "-u", url, "-p", "Hello")

    assert code == 2
    assert f"--url is '{url}' but ports go from 1 to 65535" in err
    assert server.received == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--embedding-bias-words", "a"), "1 words but --embedding-bias-weights has 0 weights"),
        (("--lora-path", "/l"), "/l holds no model.lora_config.npy"),
        (("--lora-path", "/l", "--lora-task-id", "1"), "/l holds no model.lora_config.npy"),
        (("--lora-name", "a", "--lora-task-id", "1"), "--lora-name stands alone"),
        (("--expected-outputs", "a"), "--expected-outputs has no effect without --check-out"),
        (("--check-outputs",), "--check-outputs needs --expected-outputs"),
        (("--check-outputs", "--expected-outputs", '["a", "b"]'), "1 prompts, 2 texts"),
    ],
)
def test_incompatible_flags_are_refused(server, call, flags, complaint):
    code, _, err = call("p", *flags)

    assert code == 2
    assert complaint in err
    assert server.received == []


def test_an_error_of_the_server_fails_the_run(server, call):
    server.script = lambda request: [text_reply("par"), Reply(error="no engine")]

    code, out, _ = call("p", "-S")

    assert code == 1
    assert out == "parReceived an error from server:\nno engine\n"


@pytest.mark.parametrize(
    ("prompt", "flags", "complaint"),
    [
        ("p", ("-o", "99999999999"), "max_tokens: 99999999999 cannot be sent"),
        (
            "p",
            ("--lora-task-id", "-3"),
            "lora_task_id: -3 cannot be sent as uint64. Name a whole number from 0",
        ),
        ("p", ("--temperature", "1e39"), "temperature: 1e+39 cannot be sent as float32"),
        ("caf\udce9", (), "text_input: 'caf\\udce9' is not a text in UTF-8"),
        ("p", ("--stop-words", "\udcff"), "stop_words: '\\udcff' is not a text in UTF-8"),
    ],
)
def test_values_that_fit_no_tensor_are_refused_by_name(server, call, prompt, flags, complaint):
    code, _, err = call(prompt, *flags)

    assert code == 2
    assert complaint in err
    assert server.received == []


def test_an_adapter_of_empty_files_is_refused(call, tmp_path):
    for name in ("model.lora_config.npy", "model.lora_weights.npy"):
        (tmp_path / name).touch()

    code, _, err = call("p", "--lora-path", str(tmp_path), "--lora-task-id", "1")

    assert code == 2
    assert f"{tmp_path}/model.lora_weights.npy cannot be read" in err


@pytest.mark.parametrize(
    ("weights", "config", "complaint"),
    [
        (np.ones((1, 1, 4)), [[[1, 0, 1.5]]], "lora_config: 1.5 cannot be sent as int32"),
        (np.ones((1, 1, 4)), [[[1, 0, 2**32 + 1]]], "lora_config: 4294967297 cannot be sent"),
        (np.full((1, 1, 4), 7e4), [[[1, 0, 1]]], "lora_weights: 70000.0 cannot be sent as flo"),
        (np.ones((1, 4)), [[[1, 0, 1]]], "lora_weights.npy has the shape [1, 4] but must be"),
        (np.ones((1, 1, 4)), 3, "lora_config.npy has the shape [] but must be [1, modules"),
    ],
)
def test_an_adapter_that_does_not_fit_its_tensor_is_refused(
    server, call, tmp_path, weights, config, complaint
):
    np.save(tmp_path / "model.lora_weights.npy", weights)
    np.save(tmp_path / "model.lora_config.npy", config)

    code, _, err = call("p", "--lora-path", str(tmp_path), "--lora-task-id", "1")

    assert code == 2
    assert complaint in err
    assert server.received == []
