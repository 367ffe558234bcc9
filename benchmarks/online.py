"""A served shape under every load of the online table, through HTTP and gRPC.

    python benchmarks/online.py --shape llama8b --ceilings-of results.jsonl --json served.jsonl

Starts `trimaran serve` with weights made at random and the rules of docs/performance.md, sends
the points one after the other by `trimaran bench serve`, appends a line after each, and ends
the server. The name of a point is the prompt and output length, followed by the number of
simultaneous requests (``467/256x500``) or by the arrivals a second (``467/256@16``, exponential
gaps). Unknown flags are passed to `trimaran serve`. A failed point is reported with the end of
the server's log. A point without time left in ``--seconds`` is skipped. Both make the exit code
1.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.bench.limits.shapes import SHAPES, shape_config
from trimaran.bench.results import results
from trimaran.bench.serving.server_process import (
    BIN,
    ServerFailedError,
    ServerProcess,
    log_end,
    serving,
    write_random_model,
    write_repository,
)

_MAX_SEQ_LEN = 8192
_MAX_BATCH_SIZE = 1024
_SERVE = (
    "--load-format", "random", "--max-batch-size", str(_MAX_BATCH_SIZE),
    "--max-num-tokens", "8192", "--exit-timeout", "3",
)  # fmt: skip
_TEMPERATURE = ("--temperature", "1.0")
_WARMUP = 160
"""Requests that warm a protocol up: full steps of prompts, then decodes of many."""
_DRAIN_S = 12.0
"""Time of a point beside its arrivals: start, warm-up, last answers."""


@dataclass(frozen=True)
class Point:
    """Requests of one length, all at once (rate -1) or at this rate a second."""

    isl: int
    osl: int
    requests: int
    rate: float = -1.0
    concurrency: int = 500
    load_processes: int = 6
    needs_s: float = 0.0
    """The duration of the point for the 8B shape on one H200, if requests come at once."""

    @property
    def name(self) -> str:
        """The name by which ``--points`` selects the point."""
        arrivals = f"@{self.rate:g}" if self.rate > 0 else f"x{self.requests}"
        return f"{self.isl}/{self.osl}{arrivals}"

    def seconds(self, requests: int, runs: int) -> float:
        """The time limit of the point with this many requests in each run."""
        longest = requests / self.rate + _DRAIN_S if self.rate > 0 else self.needs_s
        return runs * longest


POINTS = (
    Point(467, 256, 500, needs_s=18.0),
    Point(202, 214, 500, needs_s=17.0),
    Point(128, 256, 1024, concurrency=256, needs_s=20.0),
    Point(467, 256, 320, rate=16),
    Point(467, 256, 640, rate=32),
    Point(467, 256, 160, rate=8, load_processes=4),
    Point(467, 256, 60, rate=2, load_processes=2),
)


class Sweep:
    """Sends points to a server, and records the names of failed and skipped points."""

    def __init__(self, server: ServerProcess, folder: Path, args: argparse.Namespace) -> None:
        self._server = server
        self._folder = folder
        self._args = args
        self._shape = ("--vocab-size", str(SHAPES[args.shape]["vocab_size"]))
        self._has_title = False
        self.failed: list[str] = []
        self.left_out: list[str] = []

    def run(self, protocol: str, points: Sequence[Point]) -> None:
        """A protocol's points in turn, after a warm-up that is not counted."""
        count = str(self._num_requests(_WARMUP))
        words = ["--input-len", "467", "--output-len", "24", "-c", count]
        words += ["--num-requests", count, "--warmup", "0"]
        self._bench(protocol, f"{protocol} warm-up", words)
        for point in points:
            name = f"{protocol} {point.name}"
            needed_s = point.seconds(self._num_requests(point.requests), self._args.runs)
            if self._left_s() < needed_s:
                print(f"{name}: left out, {self._left_s():.0f} s are left", flush=True)
                self.left_out.append(name)
            else:
                self._measure(protocol, point, name)

    def _measure(self, protocol: str, point: Point, name: str) -> None:
        count = self._num_requests(point.requests)
        lines = self._folder / "lines.jsonl"
        lines.unlink(missing_ok=True)
        words = [
            "--shape", self._args.shape, "--load", f"{point.isl}/{point.osl}x{count}",
            "--rates", str(point.rate), "--concurrencies", str(point.concurrency),
            "--load-processes", str(point.load_processes),
            "--warmup", str(self._num_requests(32)), "--runs", str(self._args.runs),
            "--output", str(lines),
        ]  # fmt: skip
        if self._args.ceilings_of:
            words += ["--ceilings-of", self._args.ceilings_of]
        table = self._bench(protocol, name, words)
        # The titles of a table of one line each.
        print("\n".join(f"{protocol:>5}{row}" for row in table[self._has_title :]), flush=True)
        self._has_title = self._has_title or bool(table)
        if self._args.json and lines.exists():
            for line in results.read([str(lines)]):
                line["command"] = results.command()
                results.append(self._args.json, line)

    def _bench(self, protocol: str, name: str, words: list[str]) -> list[str]:
        """The output of one `trimaran bench serve`; empty, with the name recorded, if it
        failed.
        """
        command = [str(BIN / "trimaran"), "bench", "serve", "-i", protocol]
        command += ["-u", self._server.address(protocol), *self._shape, *_TEMPERATURE, *words]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as bench:
            try:
                text, _ = bench.communicate(timeout=max(self._left_s(), 1.0))
            except subprocess.TimeoutExpired:
                bench.terminate()
                text = bench.communicate()[0] + "no time was left"
            except BaseException:
                bench.terminate()
                raise
        if bench.returncode == 0:
            return text.splitlines()
        self.failed.append(name)
        print(f"{name}: failed\n{text}\nthe end of the server's log:", flush=True)
        print(log_end(self._server.log), flush=True)
        return []

    def _num_requests(self, count: int) -> int:
        return min(count, self._args.requests or count)

    def _left_s(self) -> float:
        return max(float(self._args.deadline - time.monotonic()), 0.0)


def measure(folder: Path, args: argparse.Namespace, passed: list[str]) -> int:
    """Serve the shape and run the sweep; the exit code."""
    write_random_model(folder / "model", shape_config(args.shape, "bfloat16", _MAX_SEQ_LEN))
    write_repository(
        folder / "repository",
        ["tensorrt_llm"],
        engine_dir=folder / "model",
        triton_max_batch_size=_MAX_BATCH_SIZE,
        batch_scheduler_policy="max_utilization",
        kv_cache_free_gpu_mem_fraction=0.9,
    )
    flags = [*_SERVE, "--frontend-processes", str(args.frontend_processes), *passed]
    points = [point for point in POINTS if not args.points or point.name in args.points]
    longest_s = min(300.0, args.deadline - time.monotonic())
    log = folder / "serve.log"
    with serving(folder / "repository", flags, log=log, longest_s=longest_s) as server:
        print(f"ready after {server.ready_s:.1f} s", flush=True)
        sweep = Sweep(server, folder, args)
        for protocol in args.protocols:
            sweep.run(protocol, points)
    for names, what in ((sweep.failed, "failed"), (sweep.left_out, "left out")):
        if names:
            print(f"{what}: {', '.join(names)}", file=sys.stderr)
    return 1 if sweep.failed or sweep.left_out else 0


def main() -> int:
    """Measure the points that the flags name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=_Raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="tiny")
    add("--protocols", nargs="+", choices=("http", "grpc"), default=["http", "grpc"])
    names = [point.name for point in POINTS]
    add("--points", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--runs", type=int, default=1, metavar="N", help="of each point; the median is told")
    add("--requests", type=int, metavar="N", help="of a point at most, for a short look")
    add("--seconds", type=float, default=86400.0, metavar="S", help="for all, start too")
    add("--frontend-processes", type=int, default=4, metavar="N")
    add("--ceilings-of", metavar="FILE", help="machine's ceilings: a `throughput --output`")
    add("--json", metavar="FILE", help="append a JSON line a point")
    args, passed = parser.parse_known_args()
    for name in ("requests", "runs"):
        count = getattr(args, name)
        if count is not None and count < 1:
            parser.error(f"--{name} is {count} but must be 1 or more")
    args.deadline = time.monotonic() + args.seconds
    # A signal ends the server too: the exception leaves every context.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="trimaran-online-") as folder:
        try:
            return measure(Path(folder), args, passed)
        except ServerFailedError as error:
            print(error, file=sys.stderr)
            return 1


_Raw = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    sys.exit(main())
