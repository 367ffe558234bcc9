"""The result of a benchmark: the table, and the JSON file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

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
    """Streams only: a single response does not show the time of its first token."""
    return [
        1000 * (record.arrivals[0][0] - record.due_s)
        for record in records
        if record.is_stream and record.arrivals
    ]


def _inter_token(records: Sequence[Record]) -> list[float]:
    """The gap before a response, divided evenly among its tokens."""
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
    """The rows of the benchmark of Triton's TensorRT-LLM backend, then the rows of
    streaming."""
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
