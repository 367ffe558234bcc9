"""The speed of one front end: unary requests, streamed tokens and gRPC messages a second.

    .venv/bin/python benchmarks/front_end_speed.py --server-cpus 0,1 --load-cpus 2-15

The load comes from wrk (Debian's package `wrk`) over HTTP, from perf_analyzer (PyPI's wheel
`perf-analyzer`) over HTTP and gRPC, and over gRPC also from processes of `streaming.py`. Tools
that are not installed are skipped with a message. `null_engine.py` replaces the engine: unary
requests are answered at once, and each stream gets a token a step, more in total than the front
end can send. A late front end merges tokens into fewer messages, so the figure of streams
counts messages or events instead of tokens. The processor time is that of the front end's
process, all threads of it.

`live` asks for nothing (`GET /v2/health/live`): the cost of HTTP alone. `completions`, `chat`
and `chat_stream` are OpenAI requests. `--peer-url URL --peer-pid PID` drives another server of
that protocol by the same requests: the process of that number is the other front end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from streaming import (  # noqa: E402
    CHAT_TEMPLATE,
    PROMPT,
    QUEUE,
    STEPS,
    TOKENIZER,
    run_streams,
    run_unary,
    served,
)

from trimaran.bench.results.machine import environment  # noqa: E402
from trimaran.bench.serving.free_ports import free_ports  # noqa: E402
from trimaran.bench.serving.server_process import write_repository  # noqa: E402

CASES = (
    "live",
    "generate",
    "infer",
    "chat",
    "completions",
    "generate_stream",
    "chat_stream",
    "grpc_stream",
    "grpc_infer",
)
OPENAI_CASES = {"chat", "completions", "chat_stream"}
MODEL = "ensemble"
_WARMUP_S = 3.0


class Bench:
    """One server without a model, and the measurement of runs against the server."""

    def __init__(
        self, args: argparse.Namespace, folder: Path, kind: str, tree: str | None
    ) -> None:
        self.args = args
        self.tree = tree
        self.folder = folder / kind
        self.folder.mkdir(parents=True)
        self.is_stream = kind == "stream"
        self.pid = self.http = self.grpc = 0
        self.chat_url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve within the context, the front end on its processors."""
        args = self.args
        instances = {f"{name}_instance_count": 1 for name in STEPS}
        values = {**instances, **QUEUE, "decoupled_mode": self.is_stream}
        write_repository(
            self.folder / "models", **values, engine_dir=TOKENIZER, tokenizer_dir=TOKENIZER
        )
        step_ms = args.step_ms if self.is_stream else 0.0
        tokens = 1 if self.is_stream else args.unary_tokens
        flags = self.open_chats() if set(args.cases) & OPENAI_CASES else ()
        with served(self.folder, 1, step_ms, tokens, self.tree, flags) as (http, grpc, pid):
            self.http, self.grpc = http, grpc
            self.pid = front_end(pid)
            if args.server_cpus:
                for thread in os.listdir(f"/proc/{self.pid}/task"):
                    os.sched_setaffinity(int(thread), args.server_cpus)
            yield

    def run(self, case: str, load: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """One run: what the load counted, and the processor time of the front end."""
        process = psutil.Process(self.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        found = work()
        cpu_s = sum(process.cpu_times()[:2]) - before
        wall_s = time.monotonic() - start
        # Loads with their own counting window also run before and after this window.
        count = found.pop("count_in_all", None) or found["per_s"] * wall_s
        cpu_us = 1e6 * cpu_s / count
        result = {
            "case": case, "load": load, "tree": self.tree or "this", **found,
            "cpu_us": cpu_us, "cores": cpu_s / wall_s,
        }  # fmt: skip
        merged = found.get("tokens_per_message")
        if merged:
            result |= {
                "tokens_per_s": merged * found["per_s"],
                "cpu_us_a_token": cpu_us / merged,
            }
        return result

    def open_chats(self) -> tuple[str, ...]:
        """The flags that open the OpenAI port."""
        template = self.folder / "template.jinja"
        template.write_text(CHAT_TEMPLATE)
        (port,) = free_ports(1)
        self.chat_url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return "--openai-port", str(port), "--chat-template", str(template)

    def chat(self) -> dict[str, Any]:
        """The body of a chat with the prompt and length of the other requests."""
        inputs = self.inputs()
        return {
            "model": MODEL, "messages": [{"role": "user", "content": inputs["text_input"]}],
            "max_tokens": inputs["max_tokens"], "stream": inputs["stream"],
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip

    def inputs(self) -> dict[str, Any]:
        """The inputs of each request."""
        tokens = self.args.tokens if self.is_stream else self.args.unary_tokens
        return {"text_input": PROMPT, "max_tokens": tokens, "stream": self.is_stream}

    def wrk(self, case: str, seconds: float) -> dict[str, Any]:
        """Drive a route by wrk."""
        args, body = self.args, self.folder / f"{case}.json"
        if case.startswith("chat"):
            url, document = self.chat_url, self.chat()
        elif case == "completions":
            document = self.chat()
            document["prompt"] = document.pop("messages")[0]["content"]
            url = self.chat_url.replace("chat/completions", "completions")
        elif case == "live":
            url, document = f"http://127.0.0.1:{self.http}/v2/health/live", None
        else:
            url = f"http://127.0.0.1:{self.http}/v2/models/{MODEL}/{case}"
            document = infer_body(self.inputs()) if case == "infer" else self.inputs()
        body.write_text("" if document is None else json.dumps(document))
        connections = args.streams if self.is_stream else args.concurrency
        threads = min(len(os.sched_getaffinity(0)), 8, connections)
        command = [
            args.wrk, "-t", str(threads), "-c", str(connections), "-d", f"{seconds:g}s",
            "-s", str(HERE / "wrk_post.lua"), "--timeout", "30s",
            url, "--", str(body),
        ]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        text = done.stdout
        found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        if found["errors"]:
            raise SystemExit(
                f"{found['errors']} requests failed: {' '.join(command)}\n{done.stderr}"
            )
        count = found["events"] if self.is_stream else found["requests"]
        if not count:
            raise SystemExit(f"nothing was answered within {seconds:g} s: raise --seconds")
        result = {
            "per_s": count / found["seconds"], "concurrency": connections,
            "p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"],
        }  # fmt: skip
        if self.is_stream:
            result["tokens_per_message"] = args.tokens * found["requests"] / count
        return result

    def perf_analyzer(self, case: str, seconds: float) -> dict[str, Any]:
        """Drive the text model by perf_analyzer."""
        args, data = self.args, self.folder / "inputs.json"
        inputs = {name: [value] for name, value in self.inputs().items()}
        data.write_text(json.dumps({"data": [inputs]}))
        concurrency = args.streams if self.is_stream else args.concurrency
        protocol, port = ("http", self.http) if case == "infer" else ("grpc", self.grpc)
        report = self.folder / "perf_analyzer.json"
        command = [
            args.perf_analyzer, "-m", MODEL, "-i", protocol, "-u", f"127.0.0.1:{port}",
            "--input-data", str(data), "--concurrency-range", str(concurrency),
            "--measurement-interval", str(int(1000 * seconds)), "--max-trials", "3",
            "--stability-percentage", "999", "--profile-export-file", str(report),
            *(f"--shape={name}:1" for name in inputs),
            *(("--streaming",) if self.is_stream else ("--async",)),
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        text = done.stdout + done.stderr
        name = "Response Throughput" if self.is_stream else "Throughput"
        rates = re.findall(rf"^\s*{name}: ([0-9.]+) infer/sec", text, re.MULTILINE)
        if done.returncode or not rates:
            raise SystemExit(f"perf_analyzer failed: {' '.join(command)}\n{text}")
        return {"per_s": float(rates[-1]), "concurrency": concurrency}

    def own_requests(self, seconds: float) -> dict[str, Any]:
        """Drive unary gRPC requests by processes of `streaming.py`."""
        args = self.args
        num_processes = min(args.concurrency, max(1, len(os.sched_getaffinity(0)) - 1))
        # Between the two readings of the processor time the load also starts and warms up.
        count = run_unary(
            MODEL, self.grpc, args.concurrency, args.unary_tokens, num_processes, seconds
        )
        return {
            "per_s": count / seconds,
            "count_in_all": count,
            "concurrency": args.concurrency,
        }

    def own_streams(self) -> dict[str, Any]:
        """Drive gRPC streams by processes of `streaming.py`."""
        args = self.args
        num_processes = min(args.streams, max(1, len(os.sched_getaffinity(0)) - 1))
        # The number of consecutive streams that fill the time at the offered rate.
        rounds = max(1, round(1000 * args.seconds / (args.step_ms * args.tokens)))
        num_messages, elapsed_s, _ = run_streams(
            "grpc", MODEL, self.grpc, args.streams, args.tokens, num_processes, rounds
        )
        return {
            "per_s": num_messages / elapsed_s, "count_in_all": num_messages,
            "concurrency": args.streams,
            "tokens_per_message": args.streams * args.tokens * rounds / num_messages,
        }  # fmt: skip


class PeerBench(Bench):
    """Another server of OpenAI's protocol, which runs already."""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Nothing is started."""
        self.pid = self.args.peer_pid
        self.chat_url = f"{self.args.peer_url}/v1/chat/completions"
        yield


def infer_body(inputs: dict[str, Any]) -> dict[str, Any]:
    """The body of ``infer`` with these inputs."""
    datatypes = {str: "BYTES", int: "INT32", bool: "BOOL"}
    return {
        "inputs": [
            {"name": name, "datatype": datatypes[type(value)], "shape": [1, 1],
             "data": [value]}
            for name, value in inputs.items()
        ]
    }  # fmt: skip


def front_end(pid: int) -> int:
    """The process id of a server's only front end."""
    (found,) = [
        child.pid for child in psutil.Process(pid).children()
        if "trimaran.server.main" in child.cmdline()
    ]  # fmt: skip
    return int(found)


def cpus(text: str) -> set[int]:
    """Numbers of processors: ``0,1`` or ``2-15``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Every run of the chosen cases."""
    for kind, cases in (
        ("unary", ("live", "generate", "infer", "chat", "completions", "grpc_infer")),
        ("stream", ("generate_stream", "chat_stream", "grpc_stream")),
    ):
        chosen = [case for case in cases if case in args.cases]
        if not chosen:
            continue
        trees = [args.tree, args.beside] if args.beside else [args.tree]
        benches = [Bench(args, folder / str(i), kind, tree) for i, tree in enumerate(trees)]
        with ExitStack() as stack, ThreadPoolExecutor(len(benches)) as threads:
            for bench in benches:
                stack.enter_context(bench.serving())
            for case in chosen:
                for load in ("wrk", "perf_analyzer", "processes"):
                    each = [runs(bench, case, load) for bench in benches]
                    for at_once in zip(*each, strict=True):
                        # All trees at once, so that other work delays them alike.
                        yield from threads.map(lambda run: run(), at_once)
        if args.peer_url:
            peer = PeerBench(args, folder, f"{kind}-peer", None)
            peer.is_stream = kind == "stream"
            with peer.serving():
                for case in (case for case in chosen if case.startswith("chat")):
                    for run in runs(peer, case, "wrk"):
                        yield {**run(), "load": "wrk, peer"}


def runs(bench: Bench, case: str, load: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The runs of one case by one load, if the load can make that case."""
    args = bench.args
    if load == "wrk":
        if not args.wrk or case.startswith("grpc"):
            return
        work = lambda seconds: bench.wrk(case, seconds)  # noqa: E731
    elif load == "perf_analyzer":
        if not args.perf_analyzer or case in (
            "live",
            "generate",
            "generate_stream",
            *OPENAI_CASES,
        ):
            return
        work = lambda seconds: bench.perf_analyzer(case, seconds)  # noqa: E731
    elif case == "grpc_stream":
        work = lambda seconds: bench.own_streams()  # noqa: E731
    elif case == "grpc_infer":
        work = bench.own_requests
    else:
        return
    if load == "wrk":
        work(_WARMUP_S)
    for _ in range(args.repeats):
        yield partial(bench.run, case, load, lambda: work(args.seconds))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--server-cpus", type=cpus, help="the front end's: 0,1 or 0-1")
    parser.add_argument("--load-cpus", type=cpus, help="those of the load and the stub engine")
    parser.add_argument("--concurrency", type=int, default=64, help="of unary requests")
    parser.add_argument("--unary-tokens", type=int, default=16, help="of each unary answer")
    parser.add_argument("--streams", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=4.0, help="of the stub engine")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--wrk", default=shutil.which("wrk"))
    parser.add_argument("--perf-analyzer", default=shutil.which("perf_analyzer"))
    parser.add_argument("--peer-url", help="of another server of OpenAI's protocol")
    parser.add_argument("--peer-pid", type=int, help="of that server's front end")
    parser.add_argument("--tree", help="serve from this tree of another commit")
    parser.add_argument("--beside", help="another tree, which is measured at the same time")
    parser.add_argument("--label", default="", help="named in each line of --json")
    parser.add_argument("--json", help="append the figures here, one object a line")
    args = parser.parse_args()
    for name, program in (("wrk", args.wrk), ("perf_analyzer", args.perf_analyzer)):
        if not program:
            print(f"{name} is not installed: what it drives is left out")
    if args.load_cpus:
        os.sched_setaffinity(0, args.load_cpus)
    machine = environment(None)
    print(f"{'case':>15} {'load':>13} {'a second':>9} {'CPU us each':>11} {'cores':>5} "
          f"{'tokens/s':>9} {'CPU us a token':>14} tree")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(args, Path(folder)):
            print(f"{found['case']:>15} {found['load']:>13} {found['per_s']:>9,.0f} "
                  f"{found['cpu_us']:>11.1f} {found['cores']:>5.2f} "
                  f"{found.get('tokens_per_s', 0):>9,.0f} "
                  f"{found.get('cpu_us_a_token', 0):>14.1f} {found['tree']}",
                  flush=True)  # fmt: skip
            if args.json:
                line = {
                    "label": args.label, **found, "step_ms": args.step_ms,
                    "tokens": args.tokens, "unary_tokens": args.unary_tokens,
                    "command": " ".join(sys.argv), "load_average": os.getloadavg()[0],
                    "machine": machine,
                }  # fmt: skip
                with open(args.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
