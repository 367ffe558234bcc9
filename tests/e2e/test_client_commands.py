"""`trimaran client` and `trimaran bench`, and the documented scripts, against the system."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from safetensors.torch import load_file
from served import DEMO_MODEL, run_trimaran


def client(*words):
    """Run `trimaran client`; the finished process."""
    return run_trimaran("client", *map(str, words))


def test_text_is_the_same_whole_and_streamed(decoupled_server, plain_server):
    flags = ("-p", "Once upon a time", "-o", 12)
    whole = client("text", "-u", f"localhost:{plain_server.grpc_port}", *flags)
    streamed = client("text", "-u", f"localhost:{decoupled_server.grpc_port}", *flags, "-S")

    assert (whole.returncode, streamed.returncode) == (0, 0), whole.stderr + streamed.stderr
    # A stream has no prompt. The first words agree in any precision.
    assert whole.stdout.startswith("Once upon a time" + streamed.stdout[:4])


def test_responses_of_a_batch_of_prompts_are_regrouped(decoupled_server):
    prompts = json.dumps(["Once upon a time", "The sea was"])
    done = client("text", "-u", f"localhost:{decoupled_server.grpc_port}", "-p", prompts,
                  "-o", 8, "--batch-inputs", "--model-name", "tensorrt_llm_bls")  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("batch 0: Once upon a time")
    assert second.startswith("batch 1: The sea was")


def test_beams_are_printed_one_a_line(decoupled_server):
    url = f"localhost:{decoupled_server.grpc_port}"
    text = client("text", "-u", url, "-p", "Once upon a time", "-o", 8, "-b", 3)
    streamed = client("text", "-u", url, "-p", "Once upon a time", "-o", 8, "-b", 3, "-S")
    ids = client("token", "-u", url, "--tokenizer-dir", DEMO_MODEL, "--text",
                 "Once upon a time", "--request-output-len", 8, "-b", 3)  # fmt: skip

    lines = text.stdout.splitlines()
    assert [line[:8] for line in lines] == ["beam 0: ", "beam 1: ", "beam 2: "]
    told = [
        line.replace(": ", ": Once upon a time", 1) for line in streamed.stdout.splitlines()
    ]
    assert told == lines
    for number in range(3):
        assert f"Output beam {number}: " in ids.stdout


def test_a_stopped_and_a_cancelled_request_end_early(decoupled_server):
    flags = ("token", "-u", f"localhost:{decoupled_server.grpc_port}", "--tokenizer-dir",
             DEMO_MODEL, "--request-output-len", 800, "-S", "--stop-after-ms", 100)  # fmt: skip

    stopped = client(*flags, "--request-id", "12")
    cancelled = client(*flags, "--stop-via-request-cancel")

    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "Got cancellation response from server" in stopped.stdout
    assert cancelled.returncode == 0, cancelled.stdout + cancelled.stderr
    assert "Request is cancelled" in cancelled.stdout


def test_logits_and_metrics_are_printed_and_only_requested_outputs_are_sent(decoupled_server):
    flags = ("token", "-u", f"localhost:{decoupled_server.grpc_port}", "--tokenizer-dir",
             DEMO_MODEL, "--text", "Once upon a time there was", "--request-output-len", 6,
             "--return-context-logits", "--return-generation-logits", "--return-log-probs",
             "--return-perf-metrics")  # fmt: skip
    told = client(*flags, "-n", 2)
    chosen = client(*flags, "--requested-outputs", "output_ids", "sequence_length",
                    "context_logits")  # fmt: skip

    assert told.returncode == 0, told.stdout + told.stderr
    lines = told.stdout.splitlines()
    (prompt,) = (line for line in lines if line.startswith("Input sequence:"))
    num_prompt = len(json.loads(prompt.partition(":")[2]))
    assert [line.partition(":")[0] for line in lines[:2]] == ["Using pad_id", "Using end_id"]
    assert f"context_logits.shape: (1, {num_prompt}, 4096)" in lines
    assert "generation_logits.shape: (1, 1, 6, 4096)" in lines
    assert any(line.startswith("output_log_probs: [[[-") for line in lines)
    assert any(line.startswith("Output sequence 1 beam 0: ") for line in lines)
    figures = dict(
        line.split(": ") for line in lines if line.startswith("kv_") or "_ns: " in line
    )
    assert int(figures["kv_cache_alloc_total_blocks"]) == 1
    assert int(figures["arrival_time_ns"]) <= int(figures["first_token_time_ns"])
    assert chosen.returncode == 0, chosen.stdout + chosen.stderr
    assert "generation_logits.shape" not in chosen.stdout


def test_text_clients_print_logits_and_metrics_too(decoupled_server):
    for model in ("ensemble", "tensorrt_llm_bls"):
        done = client("text", "-u", f"localhost:{decoupled_server.grpc_port}", "-p",
                      '["Once upon a time", "The sea"]', "-o", 5, "--batch-inputs",
                      "--model-name", model, "--return-context-logits",
                      "--return-generation-logits", "--return-perf-metrics")  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "batch 1: The sea" in done.stdout
        assert "generation_logits.shape: (1, 1, 5, 4096)" in done.stdout
        assert "last_token_time_ns: " in done.stdout


def test_a_prompt_table_with_vectors_of_the_vocabulary_gives_the_same_answer(
    decoupled_server, tmp_path
):
    url = f"localhost:{decoupled_server.grpc_port}"
    weights = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    known = [2016, 330, 655, 261, 581]
    np.save(tmp_path / "table.npy", weights[known].float().numpy()[None])
    files = {"plain": [0, *known, 313], "virtual": [0, *range(4096, 4096 + len(known)), 313]}
    answers = {}
    for name, ids in files.items():
        (tmp_path / f"{name}.csv").write_text(",".join(map(str, ids)))
        flags = ["token", "-u", url, "--input-tokens-csv", tmp_path / f"{name}.csv"]
        if name == "virtual":
            flags += ["--prompt-embedding-table-path", tmp_path / "table.npy",
                      "--prompt_table_extra_id", 3, "--vocab_size", 4096]  # fmt: skip
        done = client(*flags, "--request-output-len", 8, "--exclude-input-in-output")
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [x for x in done.stdout.splitlines() if x.startswith("Output sequence")]
        answers[name] = line

    assert answers["plain"] == answers["virtual"]


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
        "--temperature", "1.0", "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    points = [(line["request_rate"], line["concurrency"]) for line in lines]
    assert points == [(-1, 2), (-1, 3), (50, 2), (50, 3)]
    for line in lines:
        assert (line["isl"], line["osl"], line["requests"]) == (8, 4, 6)
        assert line["temperature"] == 1.0
        assert line["failed_requests"] == 0
        assert line["ttft_ms_p50"] > 0
        assert line["itl_ms_p99"] > 0
        assert line["e2e_ms_avg"] >= line["ttft_ms_avg"]
