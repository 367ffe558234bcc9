"""`trimaran bench serve`: a server under each load, arrival rate and concurrency in turn."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
from typing import Any

from trimaran.bench.limits.latent_shape import shape_of
from trimaran.bench.limits.roofline import output_tokens_per_s
from trimaran.bench.limits.shapes import pretrained_config
from trimaran.bench.offline.load import Load
from trimaran.bench.results import machine, results
from trimaran.bench.serving import benchmark as bench
from trimaran.bench.serving import summary as bench_report
from trimaran.bench.serving.flags import refuse_given
from trimaran.bench.serving.load import Run
from trimaran.bench.serving.workload import Workload
from trimaran.client.request_flags import DEFAULT_URLS
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType, check_types

_TIMES = {"ttft": "time_to_first_token_ms", "itl": "inter_token_ms", "e2e": "latency_ms"}
_OF_ONE_RUN = (
    "num_requests", "max_input_len", "json", "metrics_url", "op_stats_csv",
    "dump_perfetto_trace", "check_perf_json", "check_perf_key", "check_perf_atol",
    "check_perf_rtol",
)  # fmt: skip
_SPREAD = ("avg", "p50", "p90", "p99")


def run_serve(args: argparse.Namespace) -> int:
    """Without ``--load``: the plain benchmark. With ``--load``: every point of the sweep."""
    if not args.load:
        _refuse_sweep(args)
        return bench.run(argparse.Namespace(**{**vars(args), "workload": None}))
    _refuse_plain(args)
    loads = [Load.parse(text, temperature=0.0) for text in args.load]
    facts = _facts(args)
    points = [(load, point) for load in loads for point in _sweep(args, load)]
    print(f"{'load':>16}{'rate':>7}{'streams':>9}{'tokens/s':>11}", end="")
    print("".join(f"{f'{name} {part} ms':>14}" for name in _TIMES for part in ("avg", "p99")))
    num_failed = 0
    for load, point in points:
        runs, stopped = _measure(point)
        if stopped is not None:
            _tell_interrupted(load, point, runs, stopped)
            raise KeyboardInterrupt
        told = _figures(point, load, runs)
        num_failed += told["failed_requests"]
        _print(load, told)
        if args.output:
            results.append(args.output, {**told, **_limit(args, load, told, facts), **facts})
    return 1 if num_failed else 0


def _refuse_sweep(args: argparse.Namespace) -> None:
    defaults = {"runs": 1, "gpus": 1}
    for name in ("rates", "concurrencies", "output", "runs", "gpus", "shape", "ceilings_of"):
        if getattr(args, name) != defaults.get(name):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} belongs to a sweep: add --load")


def _refuse_plain(args: argparse.Namespace) -> None:
    """Refuse flags that a sweep replaces, and files and limits of a single run."""
    if args.input_len is not None or args.output_len is not None:
        raise ConfigError("--load names the lengths: drop --input-len and --output-len")
    for name, given in (("request_rate", args.rates), ("concurrency", args.concurrencies)):
        if given:
            refuse_given(args, "`trimaran bench serve` with several in turn", names=[name])
    refuse_given(args, "`trimaran bench serve` with --load", names=_OF_ONE_RUN)


def _sweep(args: argparse.Namespace, load: Load) -> list[argparse.Namespace]:
    """A plain benchmark's flags for each rate and concurrency.

    Raises:
        ConfigError: a point of the sweep cannot be measured.
    """
    rates = args.rates or [args.request_rate]
    widths = args.concurrencies or [args.concurrency]
    points = [
        argparse.Namespace(
            **{
                **vars(args),
                "workload": None,
                "concurrency": width,
                "request_rate": rate,
                "num_requests": load.requests,
                "input_len": load.isl,
                "output_len": load.osl,
            }
        )
        for rate, width in itertools.product(rates, widths)
    ]
    for point in points:
        bench.check(point)
    return points


def _measure(point: argparse.Namespace) -> tuple[list[dict[str, float]], Run | None]:
    """The results of each run of a point, and the run that a Ctrl-C stopped, if any."""
    runs: list[dict[str, float]] = []
    for turn in range(point.runs):
        done = _run_once(point, turn)
        if done.num_left:
            return runs, done
        runs.append(bench_report.figures(done))
    return runs, None


def _run_once(point: argparse.Namespace, turn: int) -> Run:
    """One run with requests that no earlier run sent; an output that ends early is a
    failure.
    """
    workload = Workload(point.vocab_size, point.seed + turn)
    items = workload.fixed(point.num_requests, point.input_len, point.output_len)
    delays = workload.delays(len(items), point.request_rate, point.time_delay_dist)
    warmup = workload.unseen_prompts(items[: point.warmup])
    url = point.url or DEFAULT_URLS[point.protocol]
    # One line a point is printed, not the plain benchmark's progress.
    with contextlib.redirect_stdout(io.StringIO()):
        done = bench.measure(point, url, warmup, list(zip(items, delays, strict=True)))
    for record in done.records:
        came = record.num_output_tokens
        if not record.error and came < record.item.output_len:
            record.error = (
                f"the output ended after {came} of {record.item.output_len} tokens; does the "
                "model's max_seq_len hold the prompt and all of them?"
            )
    for error in sorted({record.error for record in done.records if record.error}):
        print(f"failed: {error}")
    return done


def _tell_interrupted(
    load: Load, point: argparse.Namespace, runs: list[dict[str, float]], stopped: Run
) -> None:
    """The results of a point: from its complete runs, else from the interrupted one."""
    what = f"{len(runs)} of {point.runs} runs"
    if not runs:
        what = f"{len(stopped.records)} of {load.requests} requests"
        runs = [bench_report.figures(stopped)] if stopped.records else []
    if not runs:
        print("interrupted before a request of this load was answered")
        return
    _print(load, _figures(point, load, runs))
    kept_out = ", and not in --output" if point.output else ""
    print(f"interrupted: the line above is that of {what}{kept_out}")


def _figures(
    args: argparse.Namespace, load: Load, runs: list[dict[str, float]]
) -> dict[str, Any]:
    rates = sorted(run["output_tokens_per_s"] for run in runs)
    told: dict[str, Any] = {
        "benchmark": "serve",
        "shape": args.shape,
        "protocol": args.protocol,
        "isl": load.isl,
        "osl": load.osl,
        "temperature": args.temperature or 0.0,
        "requests": load.requests,
        "request_rate": args.request_rate,
        "concurrency": args.concurrency,
        "load_processes": args.load_processes,
        "out_tok_s": round(statistics.median(rates), 1),
        "out_tok_s_runs": [round(rate, 1) for rate in rates],
        "req_s": round(statistics.median(run["requests_per_s"] for run in runs), 3),
        "failed_requests": int(sum(run["failed_requests"] for run in runs)),
    }
    for (short, name), part in itertools.product(_TIMES.items(), _SPREAD):
        values = [run[f"{name}_{part}"] for run in runs if f"{name}_{part}" in run]
        if values:
            told[f"{short}_ms_{part}"] = round(statistics.median(values), 3)
        if values and part == "avg":
            told[f"{short}_ms_avg_runs"] = [round(value, 3) for value in sorted(values)]
    return told


def _print(load: Load, point: dict[str, Any]) -> None:
    rate = "-" if point["request_rate"] <= 0 else f"{point['request_rate']:g}"
    cells = [point.get(f"{name}_ms_{part}") for name in _TIMES for part in ("avg", "p99")]
    times = "".join(f"{'-' if value is None else f'{value:.2f}':>14}" for value in cells)
    head = f"{load!s:>16}{rate:>7}{point['concurrency']:>9}{point['out_tok_s']:>11,.0f}"
    print(head + times, flush=True)


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    """The server's machine, assumed to be this one, and its ceilings."""
    if args.ceilings_of and not args.shape:
        raise ConfigError("--ceilings-of gives a limit only with the model's --shape")
    gpus = machine.gpus()
    count = args.gpus if gpus else 0
    facts = {"gpus": count, **results.machine_facts(gpus[0] if gpus else None, None)}
    if args.ceilings_of:
        facts |= _known_ceilings(args.ceilings_of, args.gpus)
    return facts


def _known_ceilings(path: str, num_gpus: int) -> dict[str, float]:
    names = sorted(results.CEILINGS)
    lines = [line for line in results.read([path]) if line.keys() >= results.CEILINGS]
    if not lines:
        raise ConfigError(
            f"--ceilings-of {path}: no line holds {', '.join(names)}. Name the "
            "--output of a `bench throughput` that measured them."
        )
    known = {name: lines[-1][name] for name in names}
    try:
        check_types(known, dict.fromkeys(names, JsonType.POSITIVE), may_be_null=False)
        check_types(lines[-1], {"gpus": JsonType.INTEGER})
    except ConfigError as error:
        raise ConfigError(f"--ceilings-of {path}: {error}. Name another file.") from None
    measured = max(lines[-1].get("gpus") or 1, 1)
    if measured != num_gpus:
        raise ConfigError(
            f"--ceilings-of {path} is what {measured} device(s) sustain, but "
            f"--gpus is {num_gpus}: name the result of a `bench throughput` over as many."
        )
    return known


def _limit(
    args: argparse.Namespace, load: Load, point: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """The limit for requests that arrive at once; the arrival rate limits paced requests."""
    if not args.ceilings_of or point["request_rate"] > 0:
        return {"limit_tok_s": None, "limit_pct": None}
    shape = shape_of(pretrained_config(args.shape))
    most = min(load.requests, point["concurrency"])
    limit = output_tokens_per_s(shape, results.ceilings_in(facts), load.isl, load.osl, most)
    return {
        "limit_tok_s": round(limit, 1),
        "limit_pct": round(100 * point["out_tok_s"] / limit, 1),
    }
