"""Tokens a second that front ends can stream, with an engine that computes nothing.

    .venv/bin/python benchmarks/streaming.py --frontends 1 4 --streams 256 --load-processes 4

Each run starts `trimaran serve` with `null_engine.py` as its rank, which gives every stream a
token each step. Several processes load the server over HTTP (server-sent events), gRPC or the
OpenAI port (`completions`, `chat`). The offered rate is streams by steps a second; a front end
that cannot keep up merges tokens into fewer messages, so the table has tokens a message beside
the rate, and the processor time of the front ends, which does not depend on the speed of
clients. With several repeats, protocols take turns. A stream's first token is the first event
with text, timed from the request on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import psutil
from tritonclient.grpc import service_pb2 as pb

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.free_ports import free_ports
from trimaran.bench.serving.server_process import write_repository

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "examples" / "demo_models" / "base"
STEPS = ("preprocessing", "postprocessing", "bls")
QUEUE = {"max_queue_delay_microseconds": 0, "max_queue_size": 0}
PROMPT, PROMPT_IDS = "The captain of the ship", [1, 300, 301, 302]
METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
UNARY_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_EVENT, _LAST_CHUNK = b"data: ", b"\r\n0\r\n\r\n"
TEXT = re.compile(rb'"(?:text_output|text|content)": ?"[^"]')
PATHS = {
    "http": "/v2/models/{model}/generate_stream",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
"""Routes of server-sent events by the names of `--protocols`."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def served(
    folder: Path,
    num_frontends: int,
    step_ms: float,
    tokens_a_step: int = 1,
    tree: str | None = None,
    flags: Sequence[str] = (),
) -> Iterator[tuple[int, int, int]]:
    """A server without a model: HTTP port, gRPC port and pid. It runs from ``tree`` if given,
    with further ``flags``, and serves ``folder``/models, written if missing.
    """
    repository = folder / "models"
    if not repository.exists():
        one_each = {f"{name}_instance_count": 1 for name in STEPS}
        write_repository(
            repository, **one_each, **QUEUE, engine_dir=TOKENIZER, tokenizer_dir=TOKENIZER
        )
    http, grpc_port, metrics = free_ports(3)
    command = [
        sys.executable, str(HERE / "null_server.py"), "--no-mpi", "--device", "cpu",
        "--load-format", "random",
        "--model-repo", str(repository), "--http-port", str(http),
        "--grpc-port", str(grpc_port), "--metrics-port", str(metrics),
        "--frontend-processes", str(num_frontends), *flags,
    ]  # fmt: skip
    env = {
        **os.environ, "NULL_ENGINE_STEP_MS": str(step_ms), "OMP_NUM_THREADS": "1",
        "NULL_ENGINE_TOKENS": str(tokens_a_step),
    }  # fmt: skip
    if tree:
        env["PYTHONPATH"] = os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    try:
        deadline = time.monotonic() + 60
        while "curl" not in (folder / "serve.log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit((folder / "serve.log").read_text())
            time.sleep(0.1)
        yield http, grpc_port, process.pid
    finally:
        process.terminate()
        process.wait()


# ---- load -------------------------------------------------------------------------------


def inputs_of(model: str, num_tokens: int) -> dict[str, object]:
    """The inputs of a request to the text model or to the token-level one."""
    if model == "ensemble":
        return {"text_input": PROMPT, "max_tokens": num_tokens, "stream": True}
    return {
        "input_ids": PROMPT_IDS, "input_lengths": len(PROMPT_IDS),
        "request_output_len": num_tokens, "streaming": True,
    }  # fmt: skip


def body_of(protocol: str, model: str, num_tokens: int) -> dict[str, object]:
    """The body of a stream of server-sent events."""
    if protocol == "http":
        return inputs_of(model, num_tokens)
    prompt = {"prompt": PROMPT} if protocol == "completions" else {
        "messages": [{"role": "user", "content": PROMPT}]
    }  # fmt: skip
    return {
        "model": model, **prompt, "max_tokens": num_tokens, "stream": True, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


async def event_stream(
    protocol: str, model: str, port: int, num_tokens: int
) -> tuple[int, float]:
    """Read one stream to its end: the number of its events, the seconds to its first text."""
    body, path = json.dumps(body_of(protocol, model, num_tokens)), PATHS[protocol]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b"
        % (path.format(model=model).encode(), len(body), body.encode())
    )
    num_events, tail, first_s = 0, b"", 0.0
    while tail[-len(_LAST_CHUNK) :] != _LAST_CHUNK:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"a stream ended early: {tail!r}")
        if not first_s and TEXT.search(data):
            first_s = time.monotonic() - began
        both = tail + data
        num_events += both.count(_EVENT) - tail.count(_EVENT)
        tail = both[-len(_LAST_CHUNK) :]
    writer.close()
    if not first_s:
        raise SystemExit(f"{path} streamed no text: {both[:500]!r}")
    return num_events, first_s


def infer_message(model: str, inputs: dict[str, object]) -> pb.ModelInferRequest:
    """A request with these inputs as raw contents."""
    request = pb.ModelInferRequest(model_name=model)
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        datatype, raw = "INT32", array("i", [int(v) for v in values if not isinstance(v, str)])
        data = raw.tobytes()
        if isinstance(value, bool):
            datatype, data = "BOOL", bytes([value])
        elif isinstance(value, str):
            datatype, data = "BYTES", len(value).to_bytes(4, "little") + value.encode()
        request.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        request.raw_input_contents.append(data)
    return request


async def grpc_stream(model: str, port: int, num_tokens: int) -> tuple[int, float]:
    """Read one stream to its end: the number of its messages, the seconds to the first."""
    request = infer_message(model, inputs_of(model, num_tokens))
    # Otherwise all streams of this process would share one connection and one front end.
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        began = time.monotonic()
        call = channel.stream_stream(
            METHOD, request_serializer=pb.ModelInferRequest.SerializeToString
        )(iter([request]))
        num_messages, first_s = 0, 0.0
        async for _ in call:
            num_messages += 1
            first_s = first_s or time.monotonic() - began
    return num_messages, first_s


async def grpc_unary(model: str, port: int, num_tokens: int, seconds: float) -> int:
    """Send unary requests one after the other for some time; their number."""
    inputs = {**inputs_of(model, num_tokens), "stream": False}
    request = infer_message(model, inputs)
    options = (("grpc.use_local_subchannel_pool", 1),)
    count, end = 0, time.monotonic() + seconds
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        call = channel.unary_unary(
            UNARY_METHOD, request_serializer=pb.ModelInferRequest.SerializeToString
        )
        while time.monotonic() < end:
            await call(request)
            count += 1
    return count


def unary_load(model: str, port: int, num_callers: int, num_tokens: int, seconds: float) -> int:
    """Unary requests of some callers at once in this process; the number of answers."""

    async def every() -> int:
        callers = (grpc_unary(model, port, num_tokens, seconds) for _ in range(num_callers))
        return sum(await asyncio.gather(*callers))

    return asyncio.run(every())


def run_unary(
    model: str, port: int, concurrency: int, num_tokens: int, num_processes: int, seconds: float
) -> int:
    """Unary requests over gRPC from several processes; the number of answers."""
    count = min(num_processes, concurrency)
    shares = [concurrency // count + (i < concurrency % count) for i in range(count)]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.starmap(unary_load, [(model, port, 1, num_tokens, 0.5)] * count)
        work = [(model, port, share, num_tokens, seconds) for share in shares]
        return sum(pool.starmap(unary_load, work, chunksize=1))


def load(
    protocol: str, model: str, port: int, num_streams: int, num_tokens: int, rounds: int = 1
) -> tuple[int, list[float]]:
    """Run some streams at once in this process, each so often: the number of messages, and the
    seconds to the first token of each stream."""

    async def one() -> list[tuple[int, float]]:
        if protocol == "grpc":
            return [await grpc_stream(model, port, num_tokens) for _ in range(rounds)]
        return [await event_stream(protocol, model, port, num_tokens) for _ in range(rounds)]

    async def every() -> tuple[int, list[float]]:
        found = await asyncio.gather(*(one() for _ in range(num_streams)))
        return sum(num for each in found for num, _ in each), [
            s for each in found for _, s in each
        ]

    return asyncio.run(every())


def run_streams(
    protocol: str,
    model: str,
    port: int,
    num_streams: int,
    num_tokens: int,
    num_processes: int,
    rounds: int = 1,
) -> tuple[int, float, list[float]]:
    """Run streams from several processes, each stream so often: messages, seconds, and the
    seconds to the first token of each stream."""
    count, where = min(num_processes, num_streams), (protocol, model, port)
    shares = [num_streams // count + (i < num_streams % count) for i in range(count)]
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.starmap(load, [(*where, 1, 8)] * count)
        start = time.monotonic()
        work = [(*where, share, num_tokens, rounds) for share in shares]
        found = pool.starmap(load, work, chunksize=1)
        elapsed_s = time.monotonic() - start
    return sum(num for num, _ in found), elapsed_s, [s for _, firsts in found for s in firsts]


# ---- measurement ------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Processor time of the front ends of a server so far."""
    found = [
        child for child in psutil.Process(pid).children()
        if "trimaran.server.main" in child.cmdline()
    ]  # fmt: skip
    return sum(sum(child.cpu_times()[:2]) for child in found)


def measure(
    args: argparse.Namespace, ports: dict[str, int], protocol: str, pid: int
) -> dict[str, float]:
    """One run of all streams."""
    before = cpu_seconds(pid)
    num_messages, elapsed_s, firsts_s = run_streams(
        protocol, args.model, ports[protocol], args.streams, args.tokens, args.load_processes,
        args.rounds,
    )  # fmt: skip
    cpu_s = cpu_seconds(pid) - before
    num_tokens = args.streams * args.tokens * args.rounds
    return {
        "tok_s": num_tokens / elapsed_s,
        "tokens_per_message": num_tokens / num_messages,
        "cpu_us_per_token": 1e6 * cpu_s / num_tokens,
        "cores": cpu_s / elapsed_s,
        "first_ms_p50": 1e3 * statistics.median(firsts_s),
        "first_ms_min": 1e3 * min(firsts_s),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frontends", type=int, nargs="+", default=[1])
    parser.add_argument("--protocols", nargs="+", default=["http", "grpc"],
                        choices=[*PATHS, "grpc"])  # fmt: skip
    parser.add_argument("--model", default="ensemble", choices=["ensemble", "tensorrt_llm"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=1, help="streams one after the other")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--load-processes", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", help="write the figures here, one object a line")
    args = parser.parse_args()
    offered = 1000 * args.streams / args.step_ms
    print(f"{args.streams} streams of {args.tokens} tokens; offered {offered:,.0f} tokens/s")
    print(f"{'frontends':>9} {'protocol':>11} {'tokens/s':>9} {'a message':>9} "
          f"{'CPU us/token':>12} {'cores':>6} {'first ms':>9}")  # fmt: skip
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for num_frontends in args.frontends:
            template = Path(folder) / "template.jinja"
            template.write_text(CHAT_TEMPLATE)
            (openai,) = free_ports(1)
            flags = ("--openai-port", str(openai), "--chat-template", str(template))
            with served(Path(folder), num_frontends, args.step_ms, flags=flags) as started:
                http, port, pid = started
                ports = {"http": http, "grpc": port, "completions": openai, "chat": openai}
                for protocol in args.protocols * args.repeats:
                    found = measure(args, ports, protocol, pid)
                    print(f"{num_frontends:>9} {protocol:>11} {found['tok_s']:>9,.0f} "
                          f"{found['tokens_per_message']:>9.2f} "
                          f"{found['cpu_us_per_token']:>12.1f} {found['cores']:>6.2f} "
                          f"{found['first_ms_p50']:>9.1f}",
                          flush=True)  # fmt: skip
                    lines.append({
                        "frontends": num_frontends, "protocol": protocol, "model": args.model,
                        "streams": args.streams, "tokens": args.tokens,
                        "rounds": args.rounds, "offered_tok_s": offered, **found,
                        "cpu": cpu_model(),
                        "command": " ".join(sys.argv), "python": sys.version.split()[0],
                        "cores_present": os.cpu_count(), "load": os.getloadavg()[0],
                    })  # fmt: skip
    if args.json:
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
