"""The gain of routing by prefix when conversations are served by two replicas of a model.

    .venv/bin/python benchmarks/routing.py --json benchmarks/results/routing.json

A random-weight Llama (`cpu_serving.CONFIG`, or the config.json of ``--model``) is served by
`trimaran serve --multi-model` as two instances, with one thread each on the CPU, or on a GPU
each with ``--device cuda``. Each conversation begins with a different document. Turns of
conversations run in random order, a fixed number at a time, and each turn sends the whole
history. The same conversations run once with each routing policy. The engines count reused
tokens. Other work on the machine disturbs the times, never the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cpu_serving import CONFIG

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.server_process import serving, write_random_model, write_repository

WAYS = ("least_loaded", "prefix_aware")


@contextlib.contextmanager
def served(folder: Path, routing: str, args: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Serve two replicas; yields the HTTP and the metrics port."""
    model = args.model
    if model is None:
        model = folder / "model"
        write_random_model(model, CONFIG)
    where = ["--num-threads", "1"] if args.device == "cpu" else []
    repository = folder / routing
    write_repository(
        repository,
        ["tensorrt_llm"],
        engine_dir=model,
        decoupled_mode=False,
        enable_kv_cache_reuse=True,
        **({} if args.device == "cpu" else {"gpu_device_ids": "0;1"}),
    )
    config = repository / "tensorrt_llm" / "config.pbtxt"
    config.write_text(re.sub(r"count: 1\b", "count: 2", config.read_text(), count=1))
    flags = [
        "--multi-model", "--load-format", "random", "--device", args.device, *where,
        "--max-batch-size", "32", "--max-num-tokens", "2048", "--routing", routing,
    ]  # fmt: skip
    with serving(repository, flags, log=folder / f"{routing}.log") as server:
        yield server.http, server.metrics


def ask(port: int, ids: list[int], num_tokens: int) -> list[int]:
    """The ids of one answer."""
    body = {
        "input_ids": ids, "input_lengths": len(ids), "request_output_len": num_tokens,
        "exclude_input_in_output": True, "end_id": -1,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/tensorrt_llm/generate", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return list(json.load(response)["output_ids"])


def reused_blocks(port: int) -> tuple[float, float]:
    """Blocks that the engines reused so far, and tokens a block."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()

    def value(label: str) -> float:
        series = rf'^nv_trt_llm_kv_cache_block_metrics{{.*type="{label}"}} (\S+)$'
        found = re.search(series, text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    return value("reused"), value("tokens_per")


def converse(http: int, args: argparse.Namespace) -> dict[str, float]:
    """Run all conversations; times of answers and totals."""
    draw = random.Random(5)
    talks = [
        [draw.randrange(3, 32000) for _ in range(args.document)] for _ in range(args.talks)
    ]
    said = [[draw.randrange(3, 32000) for _ in range(args.turn)] for _ in range(args.turns)]
    seconds: list[float] = []
    num_input = 0

    def turn(index: int, number: int) -> None:
        nonlocal num_input
        talk = talks[index]
        if number:
            talk += said[number]
        num_input += len(talk)
        start = time.perf_counter()
        talk += ask(http, talk, args.output)
        seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    with ThreadPoolExecutor(args.concurrency) as pool:
        for number in range(args.turns):
            order = draw.sample(range(args.talks), args.talks)
            # A round ends before the next round begins: no conversation overtakes itself.
            list(pool.map(lambda index, number=number: turn(index, number), order))
    return {
        "seconds": time.perf_counter() - start,
        "median_answer_s": statistics.median(seconds),
        "prompt_tokens": num_input,
        "output_tokens": args.output * len(seconds),
    }


def measure(folder: Path, routing: str, args: argparse.Namespace) -> dict[str, float]:
    """One run of all conversations on fresh engines."""
    with served(folder, routing, args) as (http, metrics):
        list(ThreadPoolExecutor(4).map(lambda n: ask(http, [n + 3] * 40, 8), range(8)))
        time.sleep(0.5)
        before, _ = reused_blocks(metrics)
        found = converse(http, args)
        time.sleep(0.5)
        after, size = reused_blocks(metrics)
    found["reused_share"] = (after - before) * size / found["prompt_tokens"]
    found["output_tokens_per_s"] = found["output_tokens"] / found["seconds"]
    return found


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--document", type=int, default=256, help="tokens of a first message")
    parser.add_argument("--turn", type=int, default=48, help="tokens of each later one")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="folder with a config.json")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for _ in range(args.repeats):
        for routing in WAYS:
            with tempfile.TemporaryDirectory(prefix="trimaran-bench-") as name:
                rows.append({"routing": routing, **measure(Path(name), routing, args)})
    print(f"{'routing':>14} {'reused':>7} {'tokens/s':>9} {'median answer':>14}")
    for row in rows:
        print(
            f"{row['routing']:>14} {row['reused_share']:>7.0%} "
            f"{row['output_tokens_per_s']:>9.0f} {row['median_answer_s']:>12.2f} s"
        )
    print(f"load average before {before:.2f}, after {os.getloadavg()[0]:.2f}")
    if args.json:
        report = {
            "command": "benchmarks/routing.py",
            "device": "two GPUs" if args.device == "cuda" else f"{cpu_model()}, two threads",
            "python": platform.python_version(),
            "settings": {k: v for k, v in vars(args).items() if isinstance(v, (int, str))},
            "load_average_before": before,
            "rows": rows,
        }  # fmt: skip
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
