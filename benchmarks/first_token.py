"""Time to the first text of a stream on the OpenAI port beside that of generate_stream.

    .venv/bin/python benchmarks/first_token.py --rounds 1000

The server is that of `streaming.py`: one front end, and an engine that computes nothing. Each
round sends one request to each route, one after the other in a random order, so that other work
on the machine meets all routes alike. The table has the processor time of the front end's event
loop up to the first text, the time to the first text at the client, and the medians of the
differences within a round, each with an interval of 95 % from order statistics.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from streaming import CHAT_TEMPLATE, PATHS, TEXT, body_of, served

from trimaran.bench.results.machine import cpu_model
from trimaran.bench.serving.free_ports import free_ports

WARM_UP = 100
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def event_loop_us(pid: int) -> float:
    """Processor time of a process's first thread so far, as the kernel's scheduler counts."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def first_text(
    connection: http.client.HTTPConnection, protocol: str, body: str, pid: int
) -> tuple[float, float]:
    """Microseconds of the front end, and milliseconds at the client, up to the first text."""
    before, began = event_loop_us(pid), time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", PATHS[protocol].format(model="ensemble"), body, headers)
    answer = connection.getresponse()
    while not TEXT.search(line := answer.readline()):
        if not line:
            raise SystemExit(f"{protocol} streamed no text")
    elapsed_ms = 1e3 * (time.perf_counter() - began)
    used_us = event_loop_us(pid) - before
    answer.read()
    return used_us, elapsed_ms


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median, with an interval that holds the true one in 95 of 100 cases."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = round(len(values) / 2 - half), round(len(values) / 2 + half)
    return (
        statistics.median(ordered),
        ordered[max(low, 0)],
        ordered[min(high, len(ordered) - 1)],
    )


def measure(
    ports: dict[str, int], pid: int, num_rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """The two figures of each request, by route."""
    connections = {
        protocol: http.client.HTTPConnection("127.0.0.1", port)
        for protocol, port in ports.items()
    }
    bodies = {protocol: json.dumps(body_of(protocol, "ensemble", 1)) for protocol in ports}
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ports}
    for number in range(num_rounds + WARM_UP):
        for protocol in random.sample(list(ports), len(ports)):
            figures = first_text(connections[protocol], protocol, bodies[protocol], pid)
            if number >= WARM_UP:
                for values, value in zip(found[protocol], figures, strict=True):
                    values.append(value)
    for connection in connections.values():
        connection.close()
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--chatml", action="store_true",
        help="render chats by ChatML with a system message; else their prompt is that of the "
        "other routes",
    )  # fmt: skip
    parser.add_argument("--json", help="write the figures here, one object a line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(CHATML if args.chatml else CHAT_TEMPLATE)
        (openai,) = free_ports(1)
        flags = ("--openai-port", str(openai), "--chat-template", str(template))
        with served(Path(folder), 1, 1.0, flags=flags) as (http_port, _, pid):
            ports = {"http": http_port, "completions": openai, "chat": openai}
            front_end = next(
                child.pid for child in psutil.Process(pid).children()
                if "trimaran.server.main" in child.cmdline()
            )  # fmt: skip
            found = measure(ports, front_end, args.rounds)
    lines = []
    for protocol, (used_us, elapsed_ms) in found.items():
        line: dict[str, object] = {
            "protocol": protocol, "rounds": args.rounds, "cpu_us": statistics.median(used_us),
            "first_ms": statistics.median(elapsed_ms), "first_ms_min": min(elapsed_ms),
        }  # fmt: skip
        for name, values, base in (
            ("cpu_us_more", used_us, found["http"][0]),
            ("first_ms_more", elapsed_ms, found["http"][1]),
        ):
            line[name] = interval([mine - its for mine, its in zip(values, base, strict=True)])
        line |= {"cpu": cpu_model(), "command": " ".join(sys.argv), "load": os.getloadavg()[0],
                 "python": sys.version.split()[0]}  # fmt: skip
        print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)
        lines.append(line)
    if args.json:
        Path(args.json).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
