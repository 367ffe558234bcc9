"""`trimaran client pipeline`: its comparisons, and the result of a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_server import Reply, ids_reply, text_reply

RECORD = {"input": "It was", "instruction": "dark", "output": "and stormy"}
ONE = ("INT32", [[2]])
BEFORE = {
    "INPUT_ID": ("INT32", [[5, 6]]), "REQUEST_INPUT_LEN": ONE, "REQUEST_OUTPUT_LEN": ONE,
    "OUT_END_ID": ONE, "OUT_PAD_ID": ONE,
}  # fmt: skip


def steps(text="It was dark and"):
    """A server whose text models stream this text."""

    def script(request):
        if request.model == "preprocessing":
            return [Reply(BEFORE, is_final=True)]
        if request.model == "tensorrt_llm":
            return [ids_reply([7]), ids_reply([8], is_final=True)]
        if request.model == "postprocessing":
            return [text_reply_of_steps("It was dark and")]
        return [text_reply(text[:3]), text_reply(text[3:], is_final=True)]

    return script


def text_reply_of_steps(text):
    return Reply({"OUTPUT": ("BYTES", [text])}, is_final=True)


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([RECORD, {**RECORD, "input": "many words " * 50}]))
    return str(path)


def flags(server, dataset, *more):
    return (
        "client", "pipeline", "-i", "grpc", "-u", f"127.0.0.1:{server.port}", "--streaming",
        "--dataset", dataset, "--max-input-len", "20", "-c", "2", *more,
    )  # fmt: skip


def test_equal_texts_succeed_and_print_their_times(trimaran, server, dataset):
    server.script = steps()
    sampling = "{'top_k': 4, 'temperature': 0.5}"

    code, out, _ = trimaran(
        *flags(server, dataset, "--test-bls", "--sampling-params", sampling)
    )

    assert code == 0
    for line in (
        "[INFO] Start testing on 1 prompts.",
        "[INFO] Functionality test succeed.",
        "[INFO] Start benchmarking on 1 prompts.",
        "[INFO] Total Latency: ",
    ):
        assert line in out
    by_model = {request.model: request.inputs for request in server.received}
    assert by_model["tensorrt_llm"]["runtime_top_k"].tolist() == [[4]]
    assert by_model["tensorrt_llm_bls"]["top_k"].tolist() == [[4]]
    assert by_model["postprocessing"]["TOKENS_BATCH"].tolist() == [[[7, 8]]]


def test_a_different_text_is_reported_with_both_texts(trimaran, server, dataset):
    server.script = steps("It was light")

    code, _, err = trimaran(*flags(server, dataset))

    assert code == 1
    assert "ensemble and its steps differ" in err
    assert "'It was dark and'" in err and "'It was light'" in err


def test_an_error_of_the_server_is_printed(trimaran, server, dataset):
    server.script = lambda request: [Reply(error="no such model")]

    code, out, _ = trimaran(*flags(server, dataset))

    assert (code, out.splitlines()[-2:]) == (
        1,
        ["Received an error from server:", "no such model"],
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--sampling-params", "{'top_q': 1}"), "'top_q' is no input"),
        (("--sampling-params", "top_k=1"), "--sampling-params is no Python dictionary"),
        (("--sampling-params", "{'top_k': 'two'}"), "'top_k' is 'two' but must be a number"),
        (("--sampling-params", "{'top_k': True}"), "'top_k' is True but must be a number"),
        (("--sampling-params", "{'top_k': 0.5}"), "'top_k' is 0.5 but must be a number"),
        (("--sampling-params", "{'top_k': 2147483648}"), "a number that int32 holds"),
        (("--sampling-params", "{'top_p': 1e39}"), "a number that float32 holds"),
        (("--sampling-params", "{'top_q': 1, 1: 2}"), "1 is no input"),
        (("--output-config", "{'return_log_probs': None}"), "that bool holds"),
        (("-c", "0"), "--concurrency is 0 but must be 1 or more"),
        (("-u", "localhost:grpc"), "--url is 'localhost:grpc' but must be HOST:PORT"),
        (("--max-input-len", "1"), "holds no prompt within --max-input-len 1"),
        (("-i", "http"), "--streaming needs -i grpc"),
        (("--test-llmapi",), "does not serve the llmapi model"),
        (("--token-model-name", "a\udcff"), "--token-model-name 'a\\udcff' is not a text in"),
    ],
)
def test_flags_with_impossible_values_are_refused(trimaran, server, dataset, more, said):
    code, _, err = trimaran(*flags(server, dataset, *more))

    assert code == 2
    assert said in err


def test_no_prompt_is_dropped_without_a_limit(trimaran, server, dataset):
    server.script = steps()

    code, out, _ = trimaran(
        "client", "pipeline", "-i", "grpc", "-u", f"127.0.0.1:{server.port}", "--streaming",
        "--dataset", dataset,
    )  # fmt: skip

    assert code == 0
    assert "[INFO] Start testing on 2 prompts." in out


def test_a_record_without_a_text_is_refused(trimaran, server, dataset):
    Path(dataset).write_text(json.dumps([{**RECORD, "output": None}]))

    code, _, err = trimaran(*flags(server, dataset))

    assert code == 2
    assert f"--dataset {dataset}: must be a JSON list of objects with texts" in err
