"""The result of a benchmark: figures, the table, and the JSON file that records them."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from trimaran.bench.serving.load import Record, Run

Table = list[tuple[str, str]]


def figures(run: Run) -> dict[str, float]:
    """The figures of a run; times in ms. Failed requests count in ``failed_requests`` only."""
    done = [record for record in run.records if not record.error]
    latencies = [1000 * (record.end_s - record.due_s) for record in done]
    in_flight_s = sum(record.end_s - record.sent_s for record in done)
    num_tokens = sum(record.num_output_tokens for record in done)
    count = max(1, len(done))
    return {
        "requests": len(run.records),
        "failed_requests": len(run.records) - len(done),
        "elapsed_ms": 1000 * run.elapsed_s,
        "requests_per_s": len(done) / run.elapsed_s,
        "output_tokens_per_s": num_tokens / run.elapsed_s,
        "output_tokens": num_tokens,
        "avg_input_tokens": sum(len(record.item.ids) for record in done) / count,
        "avg_output_tokens": num_tokens / count,
        "avg_in_flight_requests": in_flight_s / run.elapsed_s,
        **_spread("latency_ms", latencies),
        **_spread("time_to_first_token_ms", _first_tokens(done)),
        **_spread("inter_token_ms", _inter_token(done)),
    }


def _first_tokens(records: Sequence[Record]) -> list[float]:
    """Only of streams: a single response says nothing of its first token."""
    return [
        1000 * (record.arrivals[0][0] - record.due_s)
        for record in records
        if record.is_stream and record.arrivals
    ]


def _inter_token(records: Sequence[Record]) -> list[float]:
    """The gap before a response, shared out evenly over the tokens that it brought."""
    gaps = []
    for record in records:
        for (before, _), (now, count) in zip(
            record.arrivals, record.arrivals[1:], strict=False
        ):
            gaps += [1000 * (now - before) / count] * count
    return gaps


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    points = np.percentile(values, (50, 90, 99))
    spread = {f"{name}_p{p}": float(v) for p, v in zip((50, 90, 99), points, strict=True)}
    return {f"{name}_avg": sum(values) / len(values), **spread}


def table(values: dict[str, float]) -> Table:
    """The rows that users of the replaced benchmark know, then those of streaming."""
    rows = [
        ("Requests/Sec", "requests_per_s"),
        ("OP tokens/sec", "output_tokens_per_s"),
        ("Avg. latency (ms)", "latency_ms_avg"),
        ("P99 latency (ms)", "latency_ms_p99"),
        ("P90 latency (ms)", "latency_ms_p90"),
        ("Avg. IP tokens per request", "avg_input_tokens"),
        ("Avg. OP tokens per request", "avg_output_tokens"),
        ("Avg. InFlight requests", "avg_in_flight_requests"),
        ("Total latency (ms)", "elapsed_ms"),
        ("Total requests", "requests"),
        ("Failed requests", "failed_requests"),
    ]
    for label, name in (
        ("time to first token", "time_to_first_token_ms"),
        ("inter-token latency", "inter_token_ms"),
    ):
        rows.append((f"Avg. {label} (ms)", f"{name}_avg"))
        rows += [(f"P{p} {label} (ms)", f"{name}_p{p}") for p in (50, 90, 99)]
    return [(label, f"{values[key]:.2f}") for label, key in rows if key in values]


def render(rows: Table) -> str:
    """The table as text."""
    wide = max(len(label) for label, _ in rows)
    right = max(len(value) for _, value in rows)
    line = f"+-{'-' * wide}-+-{'-' * right}-+"
    body = [f"| {label:<{wide}} | {value:>{right}} |" for label, value in rows]
    return "\n".join([line, f"| {'Stat':<{wide}} | {'Value':>{right}} |", line, *body, line])


def write_csv(path: str, rows: Table) -> None:
    """The table as a file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("Stat", "Value"), *rows])


def write_trace(path: str, run: Run) -> None:
    """Every request as a span, for Perfetto or chrome://tracing."""
    begin = min((record.due_s for record in run.records), default=0.0)
    spans = [
        {
            "name": f"request {number}", "ph": "X", "pid": 0, "tid": number,
            "ts": 1e6 * (record.due_s - begin), "dur": 1e6 * (record.end_s - record.due_s),
            "args": {"input_tokens": len(record.item.ids), "error": record.error,
                     "output_tokens": record.num_output_tokens},
        }
        for number, record in enumerate(run.records)
    ]  # fmt: skip
    Path(path).write_text(json.dumps({"traceEvents": spans}), encoding="utf-8")


def surroundings(metrics_url: str | None) -> dict[str, Any]:
    """What a figure depends on: this machine, versions, and what the engine says of itself."""
    packages = ("trimaran", "tritonclient", "aiohttp", "grpcio", "numpy")
    return {
        "client_host": {
            "cpu": cpu_model(),
            "num_cpus": len(os.sched_getaffinity(0)),
            "gpus": gpus(),
            "platform": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(), **{name: version(name) for name in packages},
        },
        "engine": engine_info(metrics_url) if metrics_url else None,
    }  # fmt: skip


def engine_info(metrics_url: str) -> dict[str, list[dict[str, str]]]:
    """The labels of every ``*_info`` metric of the server.

    Raises:
        OSError: nothing answers there.
    """
    with urllib.request.urlopen(metrics_url, timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {
            family.name: [dict(sample.labels) for sample in family.samples]
            for family in families
            if family.name.endswith("_info") and family.samples
        }


def cpu_model() -> str:
    """The processor's name as its kernel gives it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpus() -> list[str]:
    """The names of this host's GPUs, which are not touched."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []  # a host without GPUs has no nvidia-smi
    return listing.stdout.split("\n")[:-1]
