"""`trimaran client token`: the request on the wire, the output, and failures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scripted_server import Reply, ids_reply


@pytest.fixture
def ids_file(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("5, 6, 7\n8\n")
    return str(path)


@pytest.fixture
def call(server, trimaran, ids_file):
    """Send the ids 5 6 7 8 with more flags."""

    def run(*flags):
        return trimaran(
            "client", "token", "-u", server.url, "--input-tokens-csv", ids_file, *flags
        )

    return run


def test_the_default_request_has_the_documented_tensors(server, call):
    server.script = lambda request: [ids_reply([5, 6, 7, 8, 1, 2], is_final=True)]

    code, out, _ = call("--request-output-len", "2", "--request-id", "9")

    assert code == 0
    (request,) = server.received
    assert (request.model, request.id, request.outputs) == ("tensorrt_llm", "9", [])
    values = {name: array.tolist() for name, array in request.inputs.items()}
    assert values == {
        "input_ids": [[5, 6, 7, 8]], "input_lengths": [[4]], "request_output_len": [[2]],
        "beam_width": [[1]], "temperature": [[1.0]], "runtime_top_k": [[1]],
        "runtime_top_p": [[0.0]], "end_id": [[-1]], "pad_id": [[50256]], "streaming": [[False]],
    }  # fmt: skip
    assert out.splitlines() == [
        "Input sequence:  [5, 6, 7, 8]", "Got completed request",
        "Output sequence:  [5, 6, 7, 8, 1, 2]", "output_ids =  [[5, 6, 7, 8, 1, 2]]",
    ]  # fmt: skip


def test_optional_flags_become_tensors_and_others_are_not_sent(server, call):
    code, _, _ = call(
        "--top_k", "40", "--top-p", "0.9", "--repetition-penalty", "1.5", "--return-log-probs",
        "--exclude-input-in-output", "--lookahead_config", "[7,6,5]", "--seed", "3",
        "--requested-outputs", "output_ids", "sequence_length",
    )  # fmt: skip

    assert code == 1  # the scripted answer lacks the requested outputs
    (request,) = server.received
    values = {name: array.item() for name, array in request.inputs.items() if array.size == 1}
    assert values["runtime_top_k"] == 40
    assert values["runtime_top_p"] == np.float32(0.9)
    assert values["repetition_penalty"] == 1.5
    assert values["return_log_probs"] is True
    assert values["exclude_input_in_output"] is True
    assert values["lookahead_ngram_size"] == 6
    assert values["seed"] == 3
    assert request.outputs == ["output_ids", "sequence_length"]
    assert "presence_penalty" not in request.inputs


def test_the_seed_has_the_input_name_of_the_model(server, call):
    server.input_names = ("random_seed",)

    call("--random-seed", "11")

    assert server.received[0].inputs["random_seed"].item() == 11


def test_a_stream_is_printed_incrementally_and_joined(server, call):
    server.script = lambda request: [
        ids_reply([1]), ids_reply([2, 3]), ids_reply([4]), Reply(is_final=True),
    ]  # fmt: skip

    code, out, _ = call("--streaming", "--exclude-input-in-output")

    assert code == 0
    assert out.splitlines() == [
        "Input sequence:  [5, 6, 7, 8]", "[1]", "[2, 3]", "[4]", "Got completed request",
        "Output sequence:  [1, 2, 3, 4]", "output_ids =  [[1, 2, 3, 4]]",
    ]  # fmt: skip


def test_tokens_of_sequences_are_joined_by_sequence_index(server, call):
    server.script = lambda request: [
        ids_reply([1], sequence_index=("INT32", [[0]])),
        ids_reply([7], sequence_index=("INT32", [[1]])),
        ids_reply([8], sequence_index=("INT32", [[1]])),
        ids_reply([2], sequence_index=("INT32", [[0]]), is_final=True),
    ]

    _, out, _ = call("--streaming", "-n", "2")

    assert "Output sequence:  [5, 6, 7, 8, 1, 2]\nOutput sequence:  [5, 6, 7, 8, 7, 8]" in out
    assert server.received[0].inputs["num_return_sequences"].item() == 2


def test_beams_of_a_stream_are_sent_whole(server, call):
    def beams(*rows):
        width = max(len(row) for row in rows)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        return {"output_ids": ("INT32", [padded]),
                "sequence_length": ("INT32", [[len(row) for row in rows]])}  # fmt: skip

    server.script = lambda request: [
        Reply(beams([1], [2])), Reply(beams([2, 9], [1, 4, 5]), is_final=True),
    ]  # fmt: skip

    _, out, _ = call("--streaming", "-b", "2", "--exclude-input-in-output")

    assert "Output sequence:  [2, 9]\nOutput sequence:  [1, 4, 5]\n" in out
    assert out.endswith("output_ids =  [[2, 9], [1, 4, 5]]\n")


@pytest.mark.parametrize(
    ("came", "flags", "verdict", "rate", "code"),
    [
        ([1, 2, 3, 4], (), "PASS!", "1.0", 0),
        ([1, 2, 9, 4], (), "FAIL!", "0.75", 1),
        ([1, 2, 9, 4], ("--correctness-threshold", "0.7"), "PASS!", "0.75", 0),
        ([1, 2], (), "FAIL!", "0.5", 1),
    ],
)
def test_check_output_compares_ids(server, call, tmp_path, came, flags, verdict, rate, code):
    expected = tmp_path / "out.csv"
    expected.write_text("1,2,3,4")
    server.script = lambda request: [ids_reply([5, 6, 7, 8, *came], is_final=True)]

    done, out, _ = call("-c", "--output-tokens-csv", str(expected), *flags)

    assert done == code
    assert f"Output token matching rate: {rate}" in out
    assert verdict in out.splitlines()


@pytest.mark.parametrize("flags", [("--request-id", "s"), ()])
def test_a_stop_request_has_the_id_of_the_request_that_it_ends(server, call, flags):
    def script(request):
        if "stop" in request.inputs:
            return [Reply(is_final=True), Reply(is_final=True)]
        return [ids_reply([1])]

    server.script = script

    code, out, _ = call("-S", "--stop-after-ms", "50", *flags)

    assert code == 0
    first, stop = server.received
    assert stop.id == first.id
    assert stop.id == "s" if flags else len(stop.id) == 32
    assert {name: array.tolist() for name, array in stop.inputs.items()} == {
        "input_ids": [[0]], "input_lengths": [[0]], "request_output_len": [[0]],
        "stop": [[True]],
    }  # fmt: skip
    assert "Got cancellation response from server" in out
    assert "Got completed request" in out


def test_cancelling_the_call_is_reported(server, call):
    def script(request):
        yield ids_reply([1])
        server.stays_open.wait(30)

    server.script = script

    code, out, _ = call("-S", "--stop-after-ms", "500", "--stop-via-request-cancel")

    assert code == 0
    assert "Request is cancelled" in out
    # No stop request was sent. On a slow machine the cancelled request may be missing too.
    assert [request for request in server.received if "stop" in request.inputs] == []


def test_a_request_that_completes_before_its_stop_fails(server, call):
    server.script = lambda request: [ids_reply([1, 2], is_final=True)]

    code, out, _ = call("-S", "--stop-after-ms", "5000", "--request-output-len", "2")

    assert code == 1
    assert "2 tokens came although the request for 2 was stopped" in out


def test_an_error_of_the_server_is_printed_and_fails(server, call):
    server.script = lambda request: [Reply(error="Streaming is only supported in ...")]

    code, out, _ = call()

    assert code == 1
    assert "Received an error from server:\nStreaming is only supported in ..." in out


def test_an_unreachable_server_is_an_error_without_traceback(trimaran):
    code, out, _ = trimaran("client", "token", "-u", "127.0.0.1:1")

    assert code == 1
    assert "Received an error from server:" in out
    assert "Failed to connect" in out


def test_only_requested_outputs_may_come(server, call):
    server.script = lambda request: [
        ids_reply([1], is_final=True, cum_log_probs=("FP32", [[0.5]]))
    ]

    code, out, _ = call("--requested-outputs", "output_ids", "sequence_length")

    assert code == 1
    assert "outputs ['cum_log_probs', 'output_ids', 'sequence_length'] came" in out


@pytest.mark.parametrize("flag", ["return-perf-metrics", "return-kv-cache-reuse-stats"])
def test_each_performance_metric_is_printed_on_a_line(server, call, flag):
    server.script = lambda request: [
        ids_reply([5, 6, 7, 8, 1], is_final=True,
                  kv_cache_reused_blocks=("INT32", [[4]]), acceptance_rate=("FP32", [[0.5]]))
    ]  # fmt: skip

    _, out, _ = call(f"--{flag}")

    assert server.received[-1].inputs[flag.replace("-", "_")].item() is True
    assert "kv_cache_reused_blocks: 4\nacceptance_rate: 0.5\n" in out


def test_log_probs_and_logits_are_printed_if_requested(server, call):
    extra = {
        "cum_log_probs": ("FP32", [[-0.5]]),
        "generation_logits": ("FP32", [[[[0.25, 0.5, 0.75]]]]),
    }
    server.script = lambda request: [ids_reply([5, 6, 7, 8, 1], is_final=True, **extra)]

    _, silent, _ = call()
    _, out, _ = call("--return-log-probs", "--return-generation-logits")

    assert "cum_log_probs" not in silent
    assert "generation_logits" not in silent
    assert "cum_log_probs: [[-0.5]]\ngeneration_logits.shape: (1, 1, 1, 3)\n" in out
    assert "\ngeneration_logits: [[[[0.25 0.5  0.75]]]]\n" in out


def test_without_a_tokenizer_only_the_default_prompt_has_ids(server, trimaran):
    trimaran("client", "token", "-u", server.url)
    assert server.received[0].inputs["input_ids"][0, 0] == 28524

    code, _, err = trimaran("client", "token", "-u", server.url, "--text", "Hello")
    assert code == 2
    assert "--text needs --tokenizer-dir DIR" in err


def test_a_tokenizer_prints_text_and_gives_the_end_id(server, trimaran):
    demo = Path(__file__).parents[3] / "examples" / "demo_models" / "base"

    def script(request):
        ids = request.inputs["input_ids"][0].tolist()
        return [ids_reply([*ids, *ids[1:]], is_final=True)]

    server.script = script

    code, out, _ = trimaran(
        "client", "token", "-u", server.url, "--tokenizer-dir", str(demo), "--text", "Hello"
    )

    assert code == 0
    assert "Input: Hello\nOutput beam 0: Hello\n" in out
    assert server.received[0].inputs["end_id"].item() >= 0


def test_a_byte_order_mark_before_the_ids_is_ignored(server, call, ids_file):
    server.script = lambda request: [ids_reply([5, 6, 1], is_final=True)]
    Path(ids_file).write_text("5,6\n", encoding="utf-8-sig")

    assert call("--request-output-len", "1")[0] == 0

    (request,) = server.received
    assert request.inputs["input_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff\xfe1\x00", "is not a text in UTF-8"),
        (b"1, 4294967296\n", "input_ids: 4294967296 cannot be sent"),
    ],
)
def test_ids_that_cannot_be_read_or_sent_are_refused(
    server, trimaran, tmp_path, content, complaint
):
    path = tmp_path / "ids.csv"
    path.write_bytes(content)

    code, _, err = trimaran(
        "client", "token", "-u", server.url, "--input-tokens-csv", str(path)
    )

    assert code == 2
    assert complaint in err


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        (np.float32(1), "has the shape [] but must be [entries, hidden size]"),
        (np.zeros(4, np.float32), "has the shape [4] but must be"),
        (np.array([["a"]]), "holds an array of <U1. Save one of numbers"),
    ],
)
def test_an_empty_prompt_table_is_refused(server, call, tmp_path, table, complaint):
    path = tmp_path / "table.npy"
    np.save(path, table)

    code, _, err = call("--prompt-embedding-table-path", str(path))

    assert code == 2
    assert f"{path}" in err
    assert complaint in err


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("float16", np.float16(1.5).view(np.uint16)), ("bfloat16", 0x3FC0), ("float32", 1.5)],
)
def test_a_prompt_table_is_sent_in_each_dtype(server, call, tmp_path, dtype, bits):
    path = tmp_path / "table.npy"
    np.save(path, np.full((2, 4), 1.5))

    call("--prompt-embedding-table-path", str(path), "--dtype", dtype)

    (request,) = server.received
    sent = request.inputs["prompt_embedding_table"]
    assert sent.shape == (1, 2, 4)
    assert (sent.view(np.uint16) if dtype == "float16" else sent).tolist() == [[[bits] * 4] * 2]
    assert request.inputs["prompt_vocab_size"].tolist() == [[2]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_vectors_that_would_become_infinite_are_refused(server, call, tmp_path, dtype):
    path = tmp_path / "table.npy"
    np.save(path, np.full((2, 4), 1e39))

    code, _, err = call("--prompt-embedding-table-path", str(path), "--dtype", dtype)

    assert code == 2
    assert f"prompt_embedding_table: 1e+39 cannot be sent as {dtype}. Name a number" in err


def test_a_task_outside_the_prompt_table_is_refused(server, call, tmp_path):
    path = tmp_path / "table.npy"
    np.save(path, np.ones((2, 4)))

    code, _, err = call("--prompt-embedding-table-path", str(path), "--prompt-task-id", "1")

    assert code == 2
    assert f"--prompt-task-id is 1 but {path} holds 1 tasks" in err


@pytest.mark.parametrize(
    ("written", "instead"),
    [(b"(2, 4), }", b"(2, 4), {"), (b"(2, 4), }           ", b"(999999999999, 4), }")],
)
def test_a_table_with_a_damaged_header_is_refused(server, call, tmp_path, written, instead):
    path = tmp_path / "table.npy"
    np.save(path, np.ones((2, 4)))
    path.write_bytes(path.read_bytes().replace(written, instead))

    code, _, err = call("--prompt-embedding-table-path", str(path))

    assert code == 2
    assert f"{path} cannot be read" in err


@pytest.mark.parametrize("config", ["[7.5,7,7]", "[true,7,7]", '"777"', "[1e999,7,7]", "[7,7]"])
def test_lookahead_needs_three_integers(server, call, config):
    code, _, err = call("--lookahead_config", config)

    assert code == 2
    assert "must be three whole numbers, as in [7,7,7]" in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--stop-after-ms", "-5"), "--stop-after-ms is -5 but must be from 0 to"),
        (("--stop-after-ms", "9" * 30), f"{'9' * 30} but must be from 0 to 2147483647"),
        (("--stop-via-request-cancel",), "has no effect without --stop-after-ms MS"),
        (("--output-tokens-csv", "/f"), "has no effect without --check-output"),
        (("--text", "Hello"), "--text has no effect beside --input-tokens-csv"),
        (("--vocab_size", "9"), "--vocab_size has no effect without --prompt_table_extra_id"),
        (("--prompt-task-id", "1"), "1 needs --prompt-embedding-table-path FILE"),
    ],
)
def test_flags_without_effect_are_refused(server, call, flags, complaint):
    code, _, err = call(*flags)

    assert code == 2
    assert complaint in err
    assert server.received == []


@pytest.mark.parametrize("flag", ["--model-name", "--request-id", "--requested-outputs"])
def test_names_with_invalid_utf8_are_refused(server, call, flag):
    code, _, err = call(flag, "a\udcff")

    assert code == 2
    assert f"{flag} 'a\\udcff' is not a text in UTF-8" in err
    assert server.received == []


def test_an_archive_of_arrays_is_no_prompt_table(server, call, tmp_path):
    path = tmp_path / "table.npz"
    np.savez(path, table=np.zeros((2, 4), np.float32))

    code, _, err = call("--prompt-embedding-table-path", str(path))

    assert code == 2
    assert f"{path} holds no array" in err


def test_a_damaged_archive_is_refused_as_a_prompt_table(server, call, tmp_path):
    path = tmp_path / "table.npz"
    path.write_bytes(b"PK\x03\x04 and no more")

    code, _, err = call("--prompt-embedding-table-path", str(path))

    assert code == 2
    assert f"{path} cannot be read" in err


def test_a_missing_key_file_is_named_with_its_flag(server, call):
    code, _, err = call("--ssl", "--private-key", "/no/such/key.pem")

    assert code == 2
    assert "--private-key /no/such/key.pem: there is no such file" in err


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_server_of_this_machine_is_reached_without_the_proxy(server, call, monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    for other in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(other, raising=False)
    server.script = lambda request: [ids_reply([5, 6, 7, 8, 1, 2], is_final=True)]

    code, _, err = call()

    assert (code, len(server.received)) == (0, 1), err
