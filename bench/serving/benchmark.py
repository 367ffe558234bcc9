"""`trimaran bench`: loads a server and measures throughput, latency and token times."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from trimaran.bench.results import machine
from trimaran.bench.serving import summary as bench_report
from trimaran.bench.serving.flags import add_arguments as add_arguments
from trimaran.bench.serving.load import LoadGenerator, Run, Target, at_first_interrupt
from trimaran.bench.serving.load_processes import run_in_processes
from trimaran.bench.serving.targets import (
    GrpcTarget,
    HttpTarget,
    TokenModels,
    model_over_grpc,
    model_over_http,
)
from trimaran.bench.serving.workload import UNPACED, Item, Workload, within
from trimaran.client.request_flags import DEFAULT_URLS
from trimaran.client.stream import check_url
from trimaran.client.vocabulary import Vocabulary
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import UTF8, parse_json
from trimaran.comm.files.output_files import check_writable, writing

_MAX_REQUESTS = 30000
_MAX_OF_INT32 = 2**31 - 1
_MIN_RATE = 1e-6
_FILES = ("json", "op_stats_csv", "dump_perfetto_trace")
_MAX_MADE = 1 << 24
"""Limits on requests, and on tokens of a prompt, which are created in memory."""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns 1 if a request failed or the results regressed.

    Raises:
        KeyboardInterrupt: at a Ctrl-C, after the partial results are reported.
    """
    check(args)
    # Checked before the load, so that an error does not lose results.
    around = _environment(args) if args.json else {}
    expected_ms = _expected_ms(args)
    url = args.url or DEFAULT_URLS[args.protocol]
    workload = Workload(args.vocab_size, args.seed)
    items = within(_items(args, workload), args.max_input_len)
    delays = workload.delays(len(items), args.request_rate, args.time_delay_dist)
    load_before = os.getloadavg()
    started_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    warmup = workload.unseen_prompts(items[: args.warmup])
    done = measure(args, url, warmup, list(zip(items, delays, strict=True)))
    if done.num_left:
        _tell_interrupted(args, done)
        raise KeyboardInterrupt
    values = bench_report.figures(done)
    rows = bench_report.table(values)
    print(bench_report.render(rows))
    _print_errors(done, args.verbose)
    facts = {"started_at": started_at, "load_average_before": load_before, **around}
    _write_files(args, {
        "op_stats_csv": lambda path: bench_report.write_csv(path, rows),
        "dump_perfetto_trace": lambda path: bench_report.write_trace(path, done),
        "json": lambda path: _write_json(path, facts, values),
    })  # fmt: skip
    if expected_ms is not None and _is_slower(args, values["elapsed_ms"], expected_ms):
        return 1
    return 1 if values["failed_requests"] else 0


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other; raises ConfigError."""
    if args.test_llmapi:
        raise ConfigError("--test-llmapi: this version does not serve the llmapi model")
    if args.url:
        check_url(args.url)
    is_short = args.input_len is not None or args.output_len is not None
    if args.workload and is_short:
        raise ConfigError(f"--input-len and --output-len do not go with {args.workload}")
    if not args.workload and (args.input_len is None or args.output_len is None):
        raise ConfigError(
            "say what to send: --input-len N --output-len N, or a sub-command: dataset, "
            "token-norm-dist or token-from-histogram"
        )
    counts = ("concurrency", "num_requests", "input_len", "output_len", "vocab_size")
    for name in (*counts, "load_processes"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value} but must be 1 or more")
    for name in ("warmup", "seed", "input_stdev", "output_stdev", "op_tokens_per_word",
                 "temperature"):  # fmt: skip
        value = getattr(args, name, None)
        if value is not None and not value >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value} but must be 0 or more")
    _check_times(args)
    for name in ("input_mean", "input_stdev", "output_mean", "output_stdev", "temperature",
                 "check_perf_atol", "check_perf_rtol"):  # fmt: skip
        value = getattr(args, name, None)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"--{name.replace('_', '-')} is {value} but must be finite")
    _check_sizes(args)
    for name in _FILES:
        if getattr(args, name):
            check_writable(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.load_processes > args.concurrency:
        raise ConfigError(
            f"--load-processes is {args.load_processes} but only {args.concurrency} requests "
            "are in flight (--concurrency). Name as many processes at most."
        )
    if bool(args.check_perf_json) != bool(args.check_perf_key):
        raise ConfigError("--check-perf-json and --check-perf-key go together")
    if args.metrics_url and not args.json:
        raise ConfigError("--metrics-url has no effect without --json FILE to record facts in")


def _check_times(args: argparse.Namespace) -> None:
    """Refuse paces that cannot be sent, and timeouts that cannot be met."""
    rate, timeout_s = args.request_rate, args.stream_timeout
    if rate != UNPACED and not _MIN_RATE <= rate < math.inf:
        raise ConfigError(
            f"--request-rate is {rate:g} but must be a number of {_MIN_RATE:g} or more, or "
            f"{UNPACED} for requests that are sent without pauses"
        )
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigError(
            f"--stream-timeout is {timeout_s:g} but must be a number of seconds above 0"
        )
    if timeout_s is not None and args.protocol != "grpc":
        raise ConfigError(
            "--stream-timeout has no effect on HTTP. Leave it out, or ask by -i grpc."
        )


def _check_sizes(args: argparse.Namespace) -> None:
    """Refuse values that do not fit in a tensor, and prompts that do not fit in memory."""
    for name in ("output_len", "vocab_size", "output_mean", "output_stdev",
                 "op_tokens_per_word"):  # fmt: skip
        value = getattr(args, name, None)
        if value is not None and value > _MAX_OF_INT32:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value} but ids and lengths are sent as INT32: "
                f"name {_MAX_OF_INT32} at most"
            )
    for name in ("num_requests", "warmup", "input_len", "input_mean", "input_stdev"):
        value = getattr(args, name, None)
        if value is not None and value > _MAX_MADE:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value} but prompts are made before the first "
                f"is sent: name {_MAX_MADE} at most"
            )


def _items(args: argparse.Namespace, workload: Workload) -> list[Item]:
    count = args.num_requests or (_MAX_REQUESTS if args.workload else 10 * args.concurrency)
    if args.workload == "dataset":
        vocabulary = Vocabulary(args.tokenizer_dir)
        return workload.dataset(count, args.dataset, vocabulary, args.op_tokens_per_word)
    if args.workload == "token-norm-dist":
        inputs = (args.input_mean, args.input_stdev)
        return workload.normal(count, inputs, (args.output_mean, args.output_stdev))
    if args.workload == "token-from-histogram":
        return workload.histogram(count, args.histogram_key)
    return workload.fixed(count, args.input_len, args.output_len)


def measure(
    args: argparse.Namespace, url: str, warmup: list[Item], plan: list[tuple[Item, float]]
) -> Run:
    """Send the warm-up, then each item when it is due, from as many processes as requested.

    A Ctrl-C after the warm-up stops the load; the run has the results so far.
    """
    print("[INFO] Warm up for benchmarking.")
    if args.load_processes == 1:
        done = uvloop.run(_measure_here(args, url, warmup, plan))
    else:
        make_target = partial(_target, args, url)
        done = run_in_processes(
            make_target, warmup, plan, args.concurrency, args.load_processes
        )
    if not done.num_left:
        print(f"[INFO] Total Latency: {1000 * done.elapsed_s:.3f} ms")
        latencies_s = sum(record.end_s - record.sent_s for record in done.records)
        print(f"[INFO] Total request latencies: {1000 * latencies_s:.3f} ms")
    return done


async def _measure_here(
    args: argparse.Namespace, url: str, warmup: list[Item], plan: list[tuple[Item, float]]
) -> Run:
    target = await _target(args, url)
    load = LoadGenerator(target, args.concurrency)
    try:
        await load.warm_up(warmup, len(plan))
        print(f"[INFO] Start benchmarking on {len(plan)} prompts.")
        loop = asyncio.get_running_loop()
        with (
            _Progress(len(plan)) as progress,
            at_first_interrupt(lambda: loop.call_soon_threadsafe(load.stop)),
        ):
            return await load.run(plan, progress.advance)
    finally:
        await target.close()


async def _target(args: argparse.Namespace, url: str) -> Target:
    is_http = args.protocol == "http"
    find_out = model_over_http if is_http else model_over_grpc
    names = args.tensorrt_llm_model_name or ["tensorrt_llm"]
    models = {name: await find_out(url, name) for name in names}
    others = [name for name, model in models.items() if not model.is_decoupled]
    if args.decoupled and others:
        raise ConfigError(
            f"--decoupled: model {others[0]!r} is not. Fill decoupled_mode:True, or drop the "
            "flag."
        )
    token_models = TokenModels(
        models,
        is_streaming=not args.no_streaming,
        excludes_input=args.exclude_input_in_output,
        temperature=args.temperature,
    )
    if is_http:
        return HttpTarget(url, token_models)
    target = GrpcTarget(url, token_models)
    target.stream_timeout_s = args.stream_timeout
    return target


class _Progress:
    """A progress bar on a terminal; no output elsewhere."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self) -> None:
        """One more request is done."""
        if self._bar is not None:
            self._bar.advance(self._task)


def _tell_interrupted(args: argparse.Namespace, done: Run) -> None:
    """Report the results before a Ctrl-C. They are not written to files, where they would
    count as complete.
    """
    came = len(done.records)
    asked = came + done.num_left
    print(f"[INFO] Interrupted: figures of the {came} of {asked} requests that ended.")
    if came:
        print(bench_report.render(bench_report.table(bench_report.figures(done))))
    _print_errors(done, args.verbose)
    for name in _FILES:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            print(f"{flag} {getattr(args, name)} was not written", file=sys.stderr)


def _print_errors(done: Run, is_verbose: bool) -> None:
    errors = [record.error for record in done.records if record.error]
    for error in errors if is_verbose else errors[:1]:
        print(f"Request failed: {error}", file=sys.stderr)


def _environment(args: argparse.Namespace) -> dict[str, Any]:
    try:
        return machine.environment(args.metrics_url)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--metrics-url {args.metrics_url}: {error}") from error


def _write_files(
    args: argparse.Namespace, writers: Mapping[str, Callable[[str], None]]
) -> None:
    """Write every file that a flag names; a failed file does not prevent the others."""
    problems: list[ConfigError] = []
    for name, write in writers.items():
        path = getattr(args, name)
        if not path:
            continue
        try:
            with writing(f"--{name.replace('_', '-')}", path):
                write(path)
        except ConfigError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _write_json(path: str, facts: dict[str, Any], values: dict[str, float]) -> None:
    result = {
        "command": ["trimaran", *sys.argv[1:]],
        **facts,
        "load_average_after": os.getloadavg(),
        "results": {name: round(value, 4) for name, value in values.items()},
    }
    Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _expected_ms(args: argparse.Namespace) -> float | None:
    """The reference latency, if any."""
    if not args.check_perf_json:
        return None
    try:
        limits = parse_json(Path(args.check_perf_json).read_text(encoding=UTF8))
        return float(limits[args.check_perf_key])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--check-perf-json {args.check_perf_json}: no latency under "
            f"{args.check_perf_key!r}: {error}"
        ) from error


def _is_slower(args: argparse.Namespace, elapsed_ms: float, expected_ms: float) -> bool:
    allowed_ms = expected_ms * (1 + args.check_perf_rtol) + args.check_perf_atol
    if elapsed_ms <= allowed_ms:
        return False
    print(
        f"Slower than allowed: {elapsed_ms:.0f} ms in total, expected {expected_ms:.0f} and "
        f"at most {allowed_ms:.0f}",
        file=sys.stderr,
    )
    return True
