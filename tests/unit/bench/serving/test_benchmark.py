"""`trimaran bench`: workloads, pacing, figures and their files."""

from __future__ import annotations

import csv
import json
import socket
import time

import aiohttp
import numpy as np
import pytest
from bench_table import rows
from scripted_server import Reply, ids_reply

from trimaran.bench.serving import targets
from trimaran.bench.serving.load import Record, Run
from trimaran.bench.serving.summary import figures
from trimaran.bench.serving.workload import Item, Workload

SHORT = ("--input-len", "4", "--output-len", "3", "-c", "2", "--num-requests", "6")

NORMAL = ("token-norm-dist", "--output-mean", "4", "--output-stdev", "1")
DATASET = ("dataset", "--dataset", "data.json", "--tokenizer-dir", "folder")


def test_http_streams_are_counted_token_by_token(http_server, trimaran):
    http_server.events = lambda body: [
        {"output_ids": [1, 2], "sequence_length": 2}, {"output_ids": 3, "sequence_length": 1},
    ]  # fmt: skip

    code, out, _ = trimaran("bench", "-u", http_server.url, "--warmup", "1", *SHORT)

    assert code == 0
    table = rows(out)
    assert table["Total requests"] == 6
    assert table["Avg. OP tokens per request"] == 3
    assert table["Avg. IP tokens per request"] == 4
    assert table["P99 time to first token (ms)"] > 0
    assert table["P50 inter-token latency (ms)"] >= 0
    assert len(http_server.bodies) == 7
    path, body = http_server.bodies[0]
    assert path == "/v2/models/tensorrt_llm/generate_stream"
    assert len(body.pop("input_ids")) == 4
    assert body == {"input_lengths": 4, "request_output_len": 3, "streaming": True}
    lines = out.splitlines()
    assert lines[:2] == [
        "[INFO] Warm up for benchmarking.", "[INFO] Start benchmarking on 6 prompts.",
    ]  # fmt: skip
    assert lines[2].startswith("[INFO] Total Latency: ")
    assert lines[3].startswith("[INFO] Total request latencies: ")


@pytest.mark.parametrize(
    "lengths",
    [
        ("token_norm_dist", "--input_mean", "4", "--input_stdev", "0", "--output_mean", "3",
         "--output_stdev", "0"),
        ("token_from_histogram", "--histogram_key", "example"),
    ],
)  # fmt: skip
def test_workloads_are_spelled_as_in_the_documents_and_take_global_flags_behind_their_names(
    http_server, trimaran, lengths
):
    http_server.events = lambda body: [{"output_ids": [1], "sequence_length": 1}]
    before, behind = ("-u", http_server.url, "-c", "9"), ("-c", "2", "--num-requests", "5")

    code, out, _ = trimaran("bench", *before, *lengths, *behind, "--warmup", "0")

    assert code == 0
    assert rows(out)["Total requests"] == len(http_server.bodies) == 5


def test_a_stream_of_one_token_has_a_time_to_first_token(http_server, trimaran):
    http_server.events = lambda body: [{"output_ids": [1], "sequence_length": 1}]
    one = ("--input-len", "4", "--output-len", "1", "-c", "2", "--num-requests", "6")

    _, out, _ = trimaran("bench", "-u", http_server.url, *one)
    assert rows(out)["P99 time to first token (ms)"] > 0

    # A response for all tokens says nothing of the first.
    _, out, _ = trimaran("bench", "-u", http_server.url, "--no-streaming", *one)
    assert "P99 time to first token (ms)" not in rows(out)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([1], "is no server of models: to GET"),
        ({"model_transaction_policy": [1]}, "is no server of models: to GET"),
        ("<html>", "it says HTTP 200, '<html>'. Name another --url"),
    ],
)
def test_a_server_of_another_kind_is_refused(http_server, trimaran, answer, complaint):
    http_server.config = answer

    code, _, err = trimaran("bench", "-u", http_server.url, *SHORT)

    assert code == 2
    assert complaint in err


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_wait_for_a_silent_server_is_bounded(trimaran, monkeypatch, protocol):
    monkeypatch.setattr(targets, "_CONFIG_S", 0.3)
    monkeypatch.setattr(targets, "_CONFIG_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = trimaran("bench", "-i", protocol, "-u", url, *SHORT)
    assert code == 2
    assert f"{url}" in err and "tensorrt_llm" in err


def test_requests_in_flight_stay_within_the_concurrency(http_server, trimaran):
    def slowly(body):
        time.sleep(0.05)
        return [{"output_ids": [1], "sequence_length": 1}]

    http_server.events = slowly
    paced = ("--request-rate", "1000", "--time-delay-dist", "constant")
    code, out, _ = trimaran("bench", "-u", http_server.url, *paced, *SHORT)

    assert code == 0
    table = rows(out)
    # Latencies count from when requests are due, and most wait for one of two connections.
    assert table["P99 latency (ms)"] > 120
    assert 1 < table["Avg. InFlight requests"] <= 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_stream_that_ends_without_a_token_is_a_failure(
    http_server, server, trimaran, protocol
):
    events = iter([[{"output_ids": [1], "sequence_length": 1}]] * 2)
    replies = iter([[ids_reply([1]), Reply(is_final=True)]] * 2)
    http_server.events = lambda body: next(events, [])
    server.script = lambda request: next(replies, [Reply(is_final=True)])
    url = http_server.url if protocol == "http" else server.url

    code, out, err = trimaran("bench", "-i", protocol, "-u", url, "--warmup", "0", *SHORT)

    assert code == 1
    assert rows(out)["Failed requests"] == 4
    assert rows(out)["Avg. OP tokens per request"] == 1
    assert err == "Request failed: the answer ended without a token, and without an error\n"


def test_a_model_that_is_not_decoupled_answers_once_and_its_echo_is_not_counted(
    http_server, trimaran
):
    http_server.is_decoupled = False
    http_server.events = lambda body: [{"output_ids": [0] * 7, "sequence_length": 7}]

    _, out, _ = trimaran("bench", "-u", http_server.url, *SHORT)

    table = rows(out)
    assert table["Avg. OP tokens per request"] == 3
    assert "P99 time to first token (ms)" not in table
    assert {path for path, _ in http_server.bodies} == {"/v2/models/tensorrt_llm/generate"}


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_generated_tokens_are_not_taken_for_an_echo_of_the_prompt(
    http_server, server, trimaran, is_decoupled
):
    for each in (http_server, server):
        each.is_decoupled = is_decoupled
        each.parameters = {"exclude_input_in_output": "true"}
    http_server.events = lambda body: [{"output_ids": [1, 2, 3], "sequence_length": 3}]
    server.script = lambda request: [ids_reply([1, 2, 3], is_final=True)]

    for protocol, url in (("http", http_server.url), ("grpc", server.url)):
        words = ("bench", "-i", protocol, "-u", url, "--no-streaming", *SHORT)
        code, out, _ = trimaran(*words)
        assert code == 0
        assert rows(out)["Avg. OP tokens per request"] == 3


@pytest.mark.parametrize("flags", [(), ("--no-streaming", "--exclude-input-in-output")])
def test_grpc_streams_are_counted(server, trimaran, flags):
    server.script = lambda request: [ids_reply([1]), ids_reply([2, 3]), Reply(is_final=True)]

    code, out, _ = trimaran("bench", "-i", "grpc", "-u", server.url, *SHORT, *flags)

    assert code == 0
    assert rows(out)["Avg. OP tokens per request"] == 3
    assert server.received[0].inputs["streaming"].item() is not bool(flags)


def test_a_temperature_asks_for_ids_of_the_whole_vocabulary(http_server, server, trimaran):
    http_server.events = lambda body: [{"output_ids": [1], "sequence_length": 1}]
    server.script = lambda request: [ids_reply([1]), Reply(is_final=True)]
    flags = ("--temperature", "0.5", *SHORT)

    assert trimaran("bench", "-u", http_server.url, *flags)[0] == 0
    assert trimaran("bench", "-i", "grpc", "-u", server.url, *flags)[0] == 0

    for _, body in http_server.bodies:
        assert (body["temperature"], body["runtime_top_p"]) == (0.5, 1.0)
    for request in server.received:
        assert request.inputs["temperature"].item() == 0.5
        assert request.inputs["runtime_top_p"].item() == 1.0


def test_unary_grpc_serves_models_that_are_not_decoupled(server, trimaran):
    server.is_decoupled = False
    server.script = lambda request: [ids_reply([0] * 4 + [1, 2])]

    code, out, _ = trimaran("bench", "-i", "grpc", "-u", server.url, *SHORT)

    assert code == 0
    assert rows(out)["Avg. OP tokens per request"] == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_failed_request_is_counted_apart_and_fails_the_run(
    server, http_server, trimaran, protocol
):
    http_server.events = lambda body: [{"error": "queue is full"}]
    server.script = lambda request: [Reply(error="queue is full")]
    url = server.url if protocol == "grpc" else http_server.url

    code, out, err = trimaran("bench", "-i", protocol, "-u", url, *SHORT)

    assert code == 1
    assert rows(out)["Failed requests"] == 6
    assert rows(out)["OP tokens/sec"] == 0
    assert "Request failed: ServerError: queue is full" in err


def test_requests_rotate_through_several_models(http_server, trimaran):
    http_server.events = lambda body: [{"sequence_length": 1}]
    names = ("--tensorrt-llm-model-name", "a", "--tensorrt-llm-model-name", "b")

    trimaran("bench", "-u", http_server.url, "--warmup", "0", *names, *SHORT)

    used = sorted(path.split("/")[3] for path, _ in http_server.bodies)
    assert used == ["a"] * 3 + ["b"] * 3


def test_results_go_to_files(http_server, trimaran, tmp_path):
    http_server.events = lambda body: [{"sequence_length": 1}, {"sequence_length": 2}]
    paths = [str(tmp_path / name) for name in ("r.json", "r.csv", "trace.json")]
    flags = ("--json", paths[0], "--op-stats-csv", paths[1], "--dump-perfetto-trace", paths[2])

    code, _, _ = trimaran("bench", "-u", http_server.url, *flags, *SHORT)

    assert code == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["results"]["output_tokens"] == 18
    assert result["client_host"]["num_cpus"] >= 1
    assert set(result["versions"]) >= {"trimaran", "python", "tritonclient"}
    assert len(result["load_average_before"]) == len(result["load_average_after"]) == 3
    assert result["engine"] is None
    with open(paths[1], newline="") as file:
        table = dict(csv.reader(file))
    assert float(table["Total requests"]) == 6
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert len(trace["traceEvents"]) == 6


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_run_slower_than_its_record_fails(http_server, trimaran, tmp_path, encoding):
    http_server.events = lambda body: [{"sequence_length": 3}]
    (tmp_path / "perf.json").write_text(json.dumps({"fast": -1000.0, "slow": 1e9}), encoding)
    check = ("--check-perf-json", str(tmp_path / "perf.json"), "--check-perf-key")

    assert trimaran("bench", "-u", http_server.url, *check, "slow", *SHORT)[0] == 0
    code, _, err = trimaran("bench", "-u", http_server.url, *check, "fast", *SHORT)

    assert code == 1
    assert "Slower than allowed" in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "say what to send: --input-len N --output-len N, or a sub-command"),
        (("--input-len", "4"), "say what to send"),
        (("--input-len", "0", "--output-len", "1"), "--input-len is 0 but must be 1 or more"),
        ((*SHORT, "--test-llmapi"), "does not serve the llmapi model"),
        (
            (*SHORT, "--check-perf-key", "k"),
            "--check-perf-json and --check-perf-key go together",
        ),
        ((*SHORT, "--metrics-url", "http://127.0.0.1:1"), "has no effect without --json FILE"),
        ((*SHORT, "--max-input-len", "3"), "the shortest has 4"),
        ((*SHORT, "token-from-histogram", "--histogram-key", "x"), "do not go with"),
        (("token-from-histogram", "--histogram-key", "x"), "must be one of example"),
        ((*SHORT, "--seed", "-1"), "--seed is -1 but must be 0 or more"),
        ((*SHORT, "--warmup", "-1"), "--warmup is -1 but must be 0 or more"),
        *(
            ((*SHORT, "--request-rate", rate), f"--request-rate is {rate} but must be a num")
            for rate in ("nan", "inf", "0", "-5", "1e-09")
        ),
        ((*SHORT, "--temperature", "nan"), "--temperature is nan but must be 0 or more"),
        ((*SHORT, "--temperature", "inf"), "--temperature is inf but must be finite"),
        ((*SHORT, "--check-perf-atol", "nan"), "--check-perf-atol is nan but must be finite"),
        (
            (*SHORT, "-i", "grpc", "-t", "0"),
            "--stream-timeout is 0 but must be a number of sec",
        ),
        ((*SHORT, "-t", "5"), "--stream-timeout has no effect on HTTP"),
        ((*NORMAL, "--input-mean", "4", "--input-stdev", "-1"), "--input-stdev is -1.0 but"),
        ((*NORMAL, "--input-mean", "nan", "--input-stdev", "1"), "--input-mean is nan but"),
        ((*SHORT, "--json", "/no/such/f"), "--json /no/such/f: there is no folder /no/such"),
        ((*SHORT, "--op-stats-csv", "/"), "--op-stats-csv / is a folder"),
        (("-u", "127.0.0.1:1", *SHORT), "no server answers at http://127.0.0.1:1"),
        (("-u", "http://127.0.0.1:1", *SHORT), "must be HOST:PORT"),
        (("-i", "grpc", "-u", "127.0.0.1", *SHORT), "must be HOST:PORT"),
        ((*SHORT, "--num-requests", "16777217"), "--num-requests is 16777217 but prompts are"),
        (("--input-len", "16777217", "--output-len", "1"), "name 16777216 at most"),
        ((*SHORT, "--vocab-size", "2147483648"), "--vocab-size is 2147483648 but ids"),
        ((*NORMAL, "--input-mean", "1e30", "--input-stdev", "1"), "--input-mean is 1e+30 but"),
        ((*DATASET, "--op-tokens-per-word", "nan"), "--op-tokens-per-word is nan but must be"),
        ((*DATASET, "--op-tokens-per-word", "inf"), "--op-tokens-per-word is inf but ids"),
    ],
)
def test_loads_that_cannot_run_are_refused(trimaran, words, complaint):
    code, _, err = trimaran("bench", *words)

    assert code == 2
    assert complaint in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--json", "r.json", "--metrics-url", "http://127.0.0.1:1/metrics"), "--metrics-url "),
        (("--json", "r.json", "--metrics-url", "127.0.0.1:8002"), "--metrics-url 127"),
        (("--check-perf-json", "none.json", "--check-perf-key", "k"), "--check-perf-json none"),
    ],
)
def test_missing_requirements_of_metrics_are_refused_before_the_load(
    http_server, trimaran, tmp_path, monkeypatch, words, complaint
):
    monkeypatch.chdir(tmp_path)
    code, _, err = trimaran("bench", "-u", http_server.url, *words, *SHORT)

    assert (code, http_server.bodies) == (2, [])
    assert complaint in err


def test_a_full_disk_is_reported_and_other_files_are_written(http_server, trimaran, tmp_path):
    flags = ("--op-stats-csv", "/dev/full", "--json", str(tmp_path / "r.json"))

    code, out, err = trimaran("bench", "-u", http_server.url, *flags, *SHORT)

    assert code == 2
    assert "--op-stats-csv /dev/full was not written: No space left on device" in err
    assert rows(out)["Total requests"] == 6
    assert json.loads((tmp_path / "r.json").read_text())["results"]["requests"] == 6


def test_the_flag_decoupled_refuses_other_models(http_server, trimaran):
    http_server.is_decoupled = False

    code, _, err = trimaran("bench", "-u", http_server.url, "--decoupled", *SHORT)

    assert code == 2
    assert "--decoupled: model 'tensorrt_llm' is not" in err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_dataset_gives_prompts_and_lengths_by_words(
    http_server, trimaran, tmp_path, repo_root, encoding
):
    http_server.events = lambda body: [{"sequence_length": 1}]
    records = [
        {"input": "The sea", "instruction": "was calm", "output": "one two three four"},
        {"input": "A" * 500, "instruction": "long", "output": "x"},
    ]
    (tmp_path / "d.json").write_text(json.dumps(records), encoding)
    demo = repo_root / "examples" / "demo_models" / "base"

    code, out, _ = trimaran(
        "bench", "-u", http_server.url, "--warmup", "0", "--max-input-len", "20", "dataset",
        "--dataset", str(tmp_path / "d.json"), "--tokenizer-dir", str(demo),
        "--op-tokens-per-word", "1.5",
    )  # fmt: skip

    assert code == 0
    assert "Tokenizer: Tokens per word = " in out
    ((_, body),) = http_server.bodies
    assert body["request_output_len"] == 6


class TestWorkload:
    """The same seed makes the same requests."""

    def test_lengths_are_normally_distributed(self):
        items = Workload(100).normal(2000, (50, 10), (20, 0))

        lengths = [len(item.ids) for item in items]
        assert abs(np.mean(lengths) - 50) < 1
        assert abs(np.std(lengths) - 10) < 1
        assert {item.output_len for item in items} == {20}
        assert max(max(item.ids) for item in items) < 100
        assert items == Workload(100).normal(2000, (50, 10), (20, 0))
        assert items != Workload(100, seed=1).normal(2000, (50, 10), (20, 0))

    def test_a_length_is_one_token_at_least(self):
        items = Workload(100).normal(50, (-5, 1), (0, 0))

        assert {(len(item.ids), item.output_len) for item in items} == {(1, 1)}

    def test_histogram_lengths_stay_within_the_table(self):
        items = Workload(100).histogram(500, "example")

        assert min(len(item.ids) for item in items) >= 16
        assert max(len(item.ids) for item in items) < 768
        assert max(item.output_len for item in items) < 256

    def test_gaps_are_constant_or_exponential_with_the_same_rate(self):
        constant = Workload(10).delays(5, 4.0, "constant")
        random = Workload(10).delays(4000, 4.0, "exponential_dist")

        assert constant == [0.0, 0.25, 0.5, 0.75, 1.0]
        assert abs(np.mean(np.diff(random)) - 0.25) < 0.02
        assert Workload(10).delays(3, -1, "constant") == [0.0] * 3

    def test_warm_up_prompts_have_the_same_lengths_and_other_ids(self):
        workload = Workload(1000)
        items = workload.fixed(3, 20, 5)

        unseen_prompts = workload.unseen_prompts(items)

        assert [len(item.ids) for item in unseen_prompts] == [20] * 3
        assert not {tuple(i.ids) for i in items} & {tuple(i.ids) for i in unseen_prompts}


class TestFigures:
    """Figures follow from the times of arrival."""

    def test_the_gap_before_a_response_is_divided_between_its_tokens(self):
        record = Record(Item([1, 2], 5), due_s=1.0, sent_s=1.0, is_stream=True)
        record.arrivals = [(1.5, 1), (1.9, 4)]
        record.end_s = 2.0

        values = figures(Run([record], elapsed_s=2.0))

        assert values["time_to_first_token_ms_p50"] == pytest.approx(500)
        assert values["inter_token_ms_avg"] == pytest.approx(100)
        assert values["latency_ms_p99"] == pytest.approx(1000)
        assert values["output_tokens_per_s"] == pytest.approx(2.5)
        assert values["avg_in_flight_requests"] == pytest.approx(0.5)

    def test_a_request_that_waits_for_a_connection_is_not_in_flight(self):
        records = [
            Record(Item([1], 1), 0.0, sent_s=0.0, arrivals=[(1.0, 1)], end_s=1.0),
            Record(Item([1], 1), 0.0, sent_s=1.0, arrivals=[(2.0, 1)], end_s=2.0),
        ]

        values = figures(Run(records, elapsed_s=2.0))

        assert values["avg_in_flight_requests"] == pytest.approx(1)
        assert values["latency_ms_avg"] == pytest.approx(1500)

    def test_failed_requests_do_not_count_as_fast_requests(self):
        good = Record(Item([1], 1), due_s=0.0, arrivals=[(1.0, 1)], end_s=1.0)
        bad = Record(Item([1], 1), due_s=0.0, end_s=0.001, error="refused")

        values = figures(Run([good, bad], elapsed_s=1.0))

        assert values["failed_requests"] == 1
        assert values["requests_per_s"] == 1
        assert values["latency_ms_p50"] == pytest.approx(1000)


def test_requests_find_their_connections_open(http_server, trimaran):
    http_server.events = lambda body: [{"output_ids": [1], "sequence_length": 1}]
    many = ("--input-len", "4", "--output-len", "1", "-c", "5", "--num-requests", "5")

    code, _, _ = trimaran("bench", "-u", http_server.url, "--warmup", "0", *many)

    assert code == 0
    first = next(i for i, (verb, _) in enumerate(http_server.seen) if verb == "POST")
    opened = {client for _, client in http_server.seen[:first]}
    assert {client for _, client in http_server.seen[first:]} <= opened
