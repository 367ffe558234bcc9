"""The processor time of one front end for a request, a token and an event, by case.

    .venv/bin/python benchmarks/front_end_cpu.py --tree /path/to/another/commit --rounds 20

An engine without a model (`null_engine.py`) answers unary requests at once, and gives each
stream a token a step. Every tree has its server; short runs go from tree to tree, so that other
work on the machine delays all alike. The figures are medians, each with the least run beside,
which is nearest to a quiet machine's. `front_end_speed.py` measures requests a second with wrk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))

from front_end_speed import CHAT_TEMPLATE, MODEL, front_end, infer_body
from streaming import (
    PROMPT,
    QUEUE,
    STEPS,
    TOKENIZER,
    grpc_stream,
    served,
)
from streaming import grpc_unary as unary_for

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.free_ports import free_ports
from trimaran.bench.serving.server_process import write_repository

UNARY = ("live", "generate", "infer", "completions", "chat", "grpc_infer")
STREAMS = ("generate_stream", "chat_stream", "grpc_stream")
_CPU_TIME = 2
_CHAT = "/v1/chat/completions"
_END = b"\r\n0\r\n\r\n"
_EVENT = b"data: "


@dataclass
class Server:
    """One tree's server: its ports, and the process of its front end."""

    tree: str
    http: int
    grpc: int
    openai: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time of all threads of the front end so far, ended ones among them, in
        nanosecond steps."""
        # The number of a process's clock, as the C library's clock_getcpuclockid makes it.
        return time.clock_gettime(~self.pid << 3 | _CPU_TIME)


@contextmanager
def serving(folder: Path, tree: str, tokens: int, *, is_stream: bool) -> Iterator[Server]:
    """The server of a tree."""
    folder.mkdir(parents=True)
    one_each = {f"{name}_instance_count": 1 for name in STEPS}
    write_repository(
        folder / "models", **one_each, **QUEUE, decoupled_mode=is_stream,
        engine_dir=TOKENIZER, tokenizer_dir=TOKENIZER,
    )  # fmt: skip
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    (openai,) = free_ports(1)
    flags = ("--openai-port", str(openai), "--chat-template", str(template))
    step_ms, a_step = (4.0, 1) if is_stream else (0.0, tokens)
    with served(folder, 1, step_ms, a_step, tree or None, flags) as (http, grpc, pid):
        yield Server(tree or "this", http, grpc, openai, front_end(pid))


def request_of(server: Server, case: str, tokens: int) -> tuple[int, bytes]:
    """The port and the bytes of an HTTP request."""
    if case == "live":
        return server.http, b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    is_stream = case in STREAMS
    plain = {"text_input": PROMPT, "max_tokens": tokens, "stream": is_stream}
    chat: dict[str, Any] = {
        "model": MODEL, "max_tokens": tokens, "stream": is_stream, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    if case.startswith("chat"):
        port, path = server.openai, _CHAT
        body = {**chat, "messages": [{"role": "user", "content": PROMPT}]}
    elif case == "completions":
        port, path = server.openai, "/v1/completions"
        body = {**chat, "prompt": PROMPT}
    else:
        port, path = server.http, f"/v2/models/{MODEL}/{case}"
        body = infer_body(plain) if case == "infer" else plain
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    return port, head.encode() + raw


class HttpLoad:
    """Requests over some connections of this process, each sent behind the answer before it."""

    def __init__(self, port: int, request: bytes, count: int, *, is_stream: bool) -> None:
        self._port = port
        self._request = request
        self._left = count
        self._is_stream = is_stream
        self._selector = selectors.DefaultSelector()
        self._unread: dict[socket.socket, bytes] = {}
        self.num_events = 0

    def run(self, num_connections: int) -> int:
        """Send all; the number of answers, or of events of streams."""
        count = self._left
        for _ in range(min(num_connections, count)):
            one = socket.create_connection(("127.0.0.1", self._port))
            self._selector.register(one, selectors.EVENT_READ)
            self._send(one)
        while self._unread:
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                self._read(key.fileobj)
        self._selector.close()
        return self.num_events if self._is_stream else count

    def _send(self, one: socket.socket) -> None:
        if not self._left:
            self._unread.pop(one, None)
            self._selector.unregister(one)
            one.close()
            return
        self._left -= 1
        self._unread[one] = b""
        one.sendall(self._request)

    def _read(self, one: socket.socket) -> None:
        data = one.recv(1 << 18)
        known, both = self._unread[one], self._unread[one] + data
        if not data or b'"error"' in both:
            raise SystemExit(f"a request failed: {both[:500]!r}")
        if self._is_stream:
            self.num_events += both.count(_EVENT) - known.count(_EVENT)
            both = both[-len(_END) :]
            is_whole = both == _END
        else:
            head, found, body = both.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
            is_whole = bool(found) and len(body) >= length
        self._unread[one] = both
        if is_whole:
            self._send(one)


def grpc_load(case: str, port: int, num_callers: int, each: int, tokens: int) -> int:
    """Messages of gRPC calls, made in a process of their own."""

    async def one() -> int:
        if case == "grpc_stream":
            return sum([(await grpc_stream(MODEL, port, tokens))[0] for _ in range(each)])
        return await unary_for(MODEL, port, tokens, 1.0)

    async def every() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(num_callers))))

    return asyncio.run(every())


def run(server: Server, case: str, args: argparse.Namespace) -> tuple[float, int]:
    """Processor time in seconds and the answers, messages or events of one run."""
    is_stream = case in STREAMS
    tokens = args.tokens if is_stream else args.unary_tokens
    if case.startswith("grpc"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            work = (case, server.grpc, args.streams if is_stream else 16, 2, tokens)
            before = server.cpu_s()
            count = pool.apply(grpc_load, work)
            return server.cpu_s() - before, count
    count = 2 * args.streams if is_stream else args.requests
    load = HttpLoad(*request_of(server, case, tokens), count, is_stream=is_stream)
    before = server.cpu_s()
    found = load.run(args.streams if is_stream else args.connections)
    return server.cpu_s() - before, found


def measure(servers: list[Server], case: str, args: argparse.Namespace) -> None:
    """Print a line for each server."""
    for server in servers:
        run(server, case, args)
    found: dict[str, list[tuple[float, int]]] = {server.tree: [] for server in servers}
    for _ in range(args.rounds):
        for server in servers:
            found[server.tree].append(run(server, case, args))
    for tree, runs in found.items():
        each = [1e6 * cpu_s / count for cpu_s, count in runs]
        line = f"{case:>16} {statistics.median(each):>9.1f} {min(each):>9.1f}"
        if case in STREAMS:
            num_tokens = 2 * args.streams * args.tokens
            per_token = [1e6 * cpu_s / num_tokens for cpu_s, _ in runs]
            merged = statistics.median(num_tokens / count for _, count in runs)
            line += (
                f" {statistics.median(per_token):>9.1f} {min(per_token):>9.1f} {merged:>9.2f}"
            )
        else:
            line += " " * 30
        print(f"{line} {tree}", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[*UNARY, *STREAMS])
    parser.add_argument("--tree", action="append", default=[], help="of another commit, beside")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=1000, help="of a unary run")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--unary-tokens", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    args = parser.parse_args()
    print(f"{cpu_model()}, {psutil.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'CPU us a':>16} {'answer':>9} {'least':>8} {'token':>9} {'least':>8} {'merged':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for cases, is_stream in ((UNARY, False), (STREAMS, True)):
            chosen = [case for case in cases if case in args.cases]
            with ExitStack() as stack:
                servers = [
                    stack.enter_context(
                        serving(
                            Path(folder, f"{number}{is_stream}"), tree, args.unary_tokens,
                            is_stream=is_stream,
                        )
                    )
                    for number, tree in enumerate([*args.tree, ""])
                    if chosen
                ]  # fmt: skip
                for case in chosen:
                    measure(servers, case, args)


if __name__ == "__main__":
    main()
