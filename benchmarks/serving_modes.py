"""Leader mode beside orchestrator mode: tokens a second, and processor time a token.

    .venv/bin/python benchmarks/serving_modes.py --json benchmarks/results/serving_modes.json

One random-weight Llama (`cpu_serving.CONFIG`) is served at the same time in leader mode and in
orchestrator mode, the latter once for each starter. All servers stay up, and each round sends
requests to every server in random order. Ratios are medians over rounds of an orchestrator's
figure by the leader's in the same round. Processor time is that of all processes of a server,
the idle orchestrator among them; other work on the machine disturbs processor time less than
rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cpu_serving import CONFIG, LENGTH, bench

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.server_process import serving, write_random_model, write_repository

MODES = {
    "leader": (),
    "spawn": ("--multi-model", "--worker-launch", "spawn"),
    "mpirun": ("--multi-model", "--worker-launch", "mpirun"),
}


@dataclass
class Server:
    """One running server and its figures, a value a round."""

    process: psutil.Process
    port: int
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    """Processor time of the whole server for one output token."""

    def cpu_seconds(self) -> float:
        """Processor time of all of its processes so far."""
        total = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def ask(self, concurrency: int, folder: Path) -> None:
        """One round."""
        before = self.cpu_seconds()
        self.rates.append(bench(self.port, concurrency, folder))
        num_tokens = max(4, 3 * concurrency) * LENGTH
        self.cpu_ms.append(1000 * (self.cpu_seconds() - before) / num_tokens)


@contextlib.contextmanager
def served(folder: Path, mode: str, args: argparse.Namespace) -> Iterator[Server]:
    """One server of the model in one mode."""
    flags = [
        "--num-threads", str(args.threads), "--load-format", "random", "--device", args.device,
        "--max-batch-size", "32", "--max-num-tokens", "2048", *MODES[mode],
    ]  # fmt: skip
    with serving(folder / "repository", flags, log=folder / f"{mode}.log") as server:
        yield Server(psutil.Process(server.process.pid), server.grpc)


def write_model(folder: Path) -> None:
    """A token-level model of random weights."""
    write_random_model(folder / "model", CONFIG)
    write_repository(
        folder / "repository",
        ["tensorrt_llm"],
        engine_dir=folder / "model",
        max_tokens_in_paged_kv_cache=16384,
    )


def compare(
    folder: Path, concurrency: int, args: argparse.Namespace
) -> list[dict[str, object]]:
    """Rounds over all modes at one concurrency; a row for each mode."""
    with contextlib.ExitStack() as stack:
        servers = {mode: stack.enter_context(served(folder, mode, args)) for mode in MODES}
        for number in range(args.rounds + 1):
            for mode in random.sample(list(MODES), len(MODES)):
                servers[mode].ask(concurrency, folder)
            if number == 0:  # every server's first round is a warm-up
                for server in servers.values():
                    server.rates.clear()
                    server.cpu_ms.clear()
    leader = servers["leader"]
    return [
        {
            "mode": mode,
            "concurrency": concurrency,
            "tokens_per_s": statistics.median(server.rates),
            "rate_ratio": ratio(server.rates, leader.rates),
            "cpu_ms_per_token": statistics.median(server.cpu_ms),
            "cpu_ratio": ratio(server.cpu_ms, leader.cpu_ms),
        }
        for mode, server in servers.items()
    ]


def gpu_name() -> str:
    """The first GPU, by the driver's own tool."""
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True).stdout.splitlines()[0]


def ratio(values: list[float], base: list[float]) -> float:
    """Median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    before = os.getloadavg()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="trimaran-bench-") as name:
        folder = Path(name)
        write_model(folder)
        for concurrency in args.concurrency:
            rows += compare(folder, concurrency, args)
    titles = ("mode", "concurrent", "tokens/s", "ratio", "CPU ms", "ratio")
    print("{:<8} {:>10} {:>9} {:>6} {:>7} {:>6}".format(*titles))
    for row in rows:
        print("{:<8} {:>10} {:>9.0f} {:>6.3f} {:>7.3f} {:>6.3f}".format(*row.values()))
    print(f"load average before {before[0]:.2f}, after {os.getloadavg()[0]:.2f}")
    if args.json:
        report = {
            "command": "benchmarks/serving_modes.py",
            "device": args.device if args.device == "cpu" else gpu_name(),
            "cpu": f"{cpu_model()}, {args.threads} threads",
            "python": platform.python_version(),
            "rounds": args.rounds,
            "load_average_before": before,
            "load_average_after": os.getloadavg(),
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
