"""`trimaran client` and `trimaran bench`, and the documented scripts, against the system."""

from __future__ import annotations

import json
import subprocess
import sys

from served import DEMO_MODEL, run_trimaran


def client(*words):
    """Run `trimaran client`; the finished process."""
    return run_trimaran("client", *map(str, words))


def test_text_comes_back_whole_and_streamed_alike(decoupled_server, plain_server):
    flags = ("-p", "Once upon a time", "-o", 12)
    whole = client("text", "-u", f"localhost:{plain_server.grpc_port}", *flags)
    streamed = client("text", "-u", f"localhost:{decoupled_server.grpc_port}", *flags, "-S")

    assert (whole.returncode, streamed.returncode) == (0, 0), whole.stderr + streamed.stderr
    # A stream has no prompt. The first words agree in any precision.
    assert whole.stdout.startswith("Once upon a time" + streamed.stdout[:4])


def test_a_batch_of_prompts_is_regrouped(decoupled_server):
    prompts = json.dumps(["Once upon a time", "The sea was"])
    done = client("text", "-u", f"localhost:{decoupled_server.grpc_port}", "-p", prompts,
                  "-o", 8, "--batch-inputs", "--model-name", "tensorrt_llm_bls")  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("batch 0: Once upon a time")
    assert second.startswith("batch 1: The sea was")


def test_a_stopped_and_a_cancelled_request_end_early(decoupled_server):
    flags = ("token", "-u", f"localhost:{decoupled_server.grpc_port}", "--tokenizer-dir",
             DEMO_MODEL, "--request-output-len", 800, "-S", "--stop-after-ms", 100)  # fmt: skip

    stopped = client(*flags, "--request-id", "12")
    cancelled = client(*flags, "--stop-via-request-cancel")

    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "Got cancellation response from server" in stopped.stdout
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    assert "Request is cancelled" in cancelled.stdout


def test_a_refused_request_prints_the_text_of_the_server(plain_server):
    flags = ("-u", f"localhost:{plain_server.grpc_port}", "--tokenizer-dir", DEMO_MODEL)
    done = client("token", *flags, "--streaming")

    assert done.returncode == 1
    assert "Received an error from server:" in done.stdout
    assert (
        "Streaming is only supported if model is deployed using decoupled mode." in done.stdout
    )


def test_the_documented_client_script_runs_as_written(decoupled_server, tmp_path):
    done = run_trimaran("init-repo", str(tmp_path / "repo"), "--scripts", str(tmp_path))
    assert done.returncode == 0, done.stderr

    script = tmp_path / "inflight_batcher_llm" / "client" / "inflight_batcher_llm_client.py"
    done = subprocess.run(
        [sys.executable, str(script), "--request-output-len", "20", "--tokenizer-dir",
         str(DEMO_MODEL), "--streaming", "-u", f"localhost:{decoupled_server.grpc_port}"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "Got completed request" in done.stdout
    assert "Output beam 0: " in done.stdout


def test_bench_counts_every_token_over_both_protocols(decoupled_server, tmp_path):
    for protocol, port in (
        ("http", decoupled_server.http_port), ("grpc", decoupled_server.grpc_port),
    ):  # fmt: skip
        path = tmp_path / f"{protocol}.json"
        done = run_trimaran(
            "bench", "-i", protocol, "-u", f"127.0.0.1:{port}", "--input-len", "20",
            "--output-len", "10", "-c", "4", "--num-requests", "12", "--json", str(path),
            "--metrics-url", f"http://127.0.0.1:{decoupled_server.metrics_port}/metrics",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(path.read_text())
        assert result["results"]["output_tokens"] == 120
        assert result["results"]["time_to_first_token_ms_p50"] > 0
        assert result["engine"]["trimaran_start_method_info"][0]["world_size"] == "2"


def test_bench_serve_sweeps_rates_and_concurrencies(decoupled_server, tmp_path):
    output = tmp_path / "results.jsonl"
    done = run_trimaran(
        "bench", "serve", "-i", "grpc", "-u", f"127.0.0.1:{decoupled_server.grpc_port}",
        "--load", "8/4x6", "--rates", "-1", "50", "--concurrencies", "2", "3", "--warmup", "2",
        "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    points = [(line["request_rate"], line["concurrency"]) for line in lines]
    assert points == [(-1, 2), (-1, 3), (50, 2), (50, 3)]
    for line in lines:
        assert (line["isl"], line["osl"], line["requests"]) == (8, 4, 6)
        assert line["failed_requests"] == 0
        assert line["ttft_ms_p50"] > 0
        assert line["itl_ms_p99"] > 0
        assert line["e2e_ms_avg"] >= line["ttft_ms_avg"]
