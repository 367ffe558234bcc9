"""Sends random cases for a while beside the watch, and saves the cases with a noticed
effect."""

from __future__ import annotations

import contextlib
import queue
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cases
import psutil
from cases import Case
from grpc_requests import grpc_case
from http_requests import http_case, metrics_case
from openai_requests import openai_case
from pieces import build
from raw_requests import raw_case
from sending import Outcome, Ports, Sender
from watch import Watching

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
HEAVY = 1 << 20
"""Cases of more bytes are sent one at a time: their sum has a limit of its own."""
LARGEST = 200 << 20
"""Bytes of a case at most: mutations of counts could make any number, which would end this
process and not the server."""
SETTLES_S = 8.0
"""Before memory counts: buffers and helpers of a server that has just started."""
_MAX_SAVED = 20
_NUM_SAMPLES = 12
_LOGGED = re.compile(r"Traceback \(most recent call last\)| CRITICAL |Fatal Python error")


def case_of(seed: int, number: int) -> Case:
    """The case of this number, always the same one."""
    rng = random.Random(f"{seed}:{number}")
    kinds = (http_case, grpc_case, openai_case, raw_case, metrics_case)
    make = rng.choices(kinds, (40, 30, 20, 8, 2))[0]
    while (case := make(rng)).weight > LARGEST:
        continue
    return case


@dataclass(frozen=True)
class Target:
    """The server under test."""

    ports: Ports
    pid: int
    """The process of ``trimaran serve``."""
    log: Callable[[], str] = str
    """The log so far, if it can be read."""


@dataclass(frozen=True)
class Sent:
    """A case and the time of its execution."""

    number: int
    case: Case
    begun_s: float
    ended_s: float = float("inf")


@dataclass
class Campaign:
    """The clients, the watch, and what they found."""

    target: Target
    folder: Path
    """Where cases that did harm are saved."""
    seed: int = 1
    num_clients: int = 4
    violations: list[str] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[str]] = field(default_factory=dict)
    """Some answers of each status."""
    worst: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._heavy = threading.Lock()
        self._next = 0
        self._under_way: dict[int, Sent] = {}
        self._ended: deque[Sent] = deque(maxlen=400)
        self._is_over = threading.Event()
        self._has_begun = False

    def run(self, seconds: float, numbers: list[int] | None = None) -> None:
        """Send cases until the time is over, or only the cases with the given numbers."""
        if numbers is not None:
            self.beside_watch(lambda: self._each([case_of(self.seed, n) for n in numbers]))
            return
        timer = threading.Timer(seconds, self._is_over.set)

        def send() -> None:
            timer.start()
            together([self._client] * self.num_clients)

        try:
            self.beside_watch(send)
        finally:
            timer.cancel()

    def replay(self, paths: list[Path], times: int = 1) -> None:
        """Send the cases of files; cases of one file run together."""
        files = queue.SimpleQueue[list[Case]]()
        for path in paths * times:
            files.put(cases.read(path))

        def client() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    together([partial(self._each, [case]) for case in files.get_nowait()])

        self.beside_watch(lambda: together([client] * self.num_clients))

    def beside_watch(self, send: Callable[[], object]) -> None:
        """Run an action beside the watch, after a warm-up of the server."""
        ports = self.target.ports
        with Watching(ports.http, self.target.pid, self._noticed, ports.access) as watching:
            warm_up(ports)
            time.sleep(SETTLES_S)
            watching.begin()
            with self._lock:
                self.worst.clear()
                self.violations.clear()
                self._has_begun = True
            send()
            # Effects of the last cases appear a little later.
            time.sleep(3.0)
        if "event" not in self.seen:
            self._violation("the watch ended early", [])
        if not psutil.pid_exists(self.target.pid):
            self._violation("the server has ended", [])

    def _client(self) -> None:
        sender = Sender(self.target.ports)
        while not self._is_over.is_set():
            with self._lock:
                number = self._next
                self._next += 1
            self._send(sender, number, case_of(self.seed, number))
        sender.close()

    def _each(self, in_turn: list[Case]) -> None:
        sender = Sender(self.target.ports)
        for number, case in enumerate(in_turn):
            self._send(sender, number, case)
        sender.close()

    def _send(self, sender: Sender, number: int, case: Case) -> None:
        if case.weight > HEAVY:
            with self._heavy:
                outcome, sent = self._timed(sender, number, case)
        else:
            outcome, sent = self._timed(sender, number, case)
        with self._lock:
            self.kinds[case.name] += 1
            protocol = "gRPC" if case.method else case.port
            status = f"{protocol} {outcome.kind}"
            self.statuses[status] += 1
            told = self.samples.setdefault(status, [])
            if len(told) < _NUM_SAMPLES:
                told.append(f"{number}: {case.name}: {outcome.text[-200:]}")
        if outcome.is_bug:
            self._violation(f"{case.name}: {outcome.kind} {outcome.text}", [sent])
        if outcome.kind == "refused" and not psutil.pid_exists(self.target.pid):
            self._violation("the server has ended", self._recent(time.monotonic() - 5.0))
            self._is_over.set()

    def _timed(self, sender: Sender, number: int, case: Case) -> tuple[Outcome, Sent]:
        sent = Sent(number, case, time.monotonic())
        with self._lock:
            self._under_way[id(sent)] = sent
        outcome = Outcome("not sent")
        try:
            outcome = sender.send(case)
        except (OSError, ValueError) as error:
            # The client library refuses to send some values, for example a name with NUL.
            outcome = Outcome(f"not sent: {type(error).__name__}")
        finally:
            with self._lock:
                del self._under_way[id(sent)]
                self._ended.append(
                    Sent(number, case, sent.begun_s, time.monotonic())
                )  # fmt: skip
        return outcome, sent

    def _recent(self, since_s: float) -> list[Sent]:
        """The cases that ran at that time or later."""
        with self._lock:
            ended = [sent for sent in self._ended if sent.ended_s > since_s]
            return [*self._under_way.values(), *ended]

    def _noticed(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "end":
            self.seen = event
            return
        if kind == "failure":
            self._violation(event["text"], self._recent(event["at"] - 3.0))
            return
        with self._lock:
            of = event.get("of", kind)
            size = event.get("seconds", event.get("grown_mb"))
            worst = self.worst.get(of, {})
            is_worst = size > worst.get("seconds", worst.get("grown_mb", 0.0))
        if not is_worst:
            return
        recent = self._recent(event["at"] - event.get("seconds", 0.5) - 0.2)
        event["beside"] = [f"{sent.number}: {sent.case.name}" for sent in recent][:12]
        with self._lock:
            self.worst[of] = event
        if kind == "gap" and size > MAX_GAP_S:
            self._violation(f"a gap of {size} s of the {of}", recent)
        elif kind == "memory" and size > MAX_GROWTH_MB:
            self._violation(f"memory grew by {size} MB: {event['largest']}", recent)

    def _violation(self, text: str, suspects: list[Sent]) -> None:
        with self._lock:
            self.violations.append(text)
            if not suspects or len(self.saved) >= _MAX_SAVED or not self._has_begun:
                return
            path = self.folder / f"found-{self.seed}-{len(self.saved)}.json"
            self.saved.append(path)
        numbers = [sent.number for sent in suspects]
        cases.write(
            path, [sent.case for sent in suspects], found=text, seed=self.seed, numbers=numbers
        )

    def check_log(self) -> None:
        """Errors that the server has logged are violations."""
        log = self.target.log()
        for found in _LOGGED.finditer(log):
            self._violation(f"the log: {log[found.start() : found.start() + 3000]}", [])

    def report(self) -> dict[str, Any]:
        """The number of cases, and the worst observations of other clients."""
        return {
            "seed": self.seed,
            "requests": self.kinds.total(),
            "statuses": dict(self.statuses.most_common()),
            "samples": self.samples,
            "kinds": len(self.kinds),
            "most frequent kinds": dict(self.kinds.most_common(12)),
            "worst": self.worst,
            "seen": self.seen,
            "violations": self.violations,
            "saved": [str(path) for path in self.saved],
        }


def together(actions: list[Callable[[], object]]) -> None:
    """Run all at the same time, to their ends. The first error of an action is raised then."""
    with ThreadPoolExecutor(len(actions)) as pool:
        running = [pool.submit(action) for action in actions]
    for each in running:
        each.result()


def warm_up(ports: Ports) -> None:
    """Requests after which every helper process of a server is there."""
    sender = Sender(ports)
    words = {"times": 3_000, "of": '"a long word",'}
    generate = "/v2/models/ensemble/generate"
    bodies: list[Any] = [
        {"times": 1 << 20, "of": " "},
        ['{"max_tokens":1,"text_input":"a","stop_words":[', words, '"b"]}'],
        {"json": {"text_input": "a", "max_tokens": 2}},
        {"json": {
            "text_input": "a", "max_tokens": 2, "guided_decoding_guide_type": "regex",
            "guided_decoding_guide": "[0-9]",
        }},
    ]  # fmt: skip
    clients = []
    for body in bodies * 2:
        length = len(build(body))
        head = f"POST {generate} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        clients.append(partial(Sender(ports).send, Case("warm-up", parts=[[head, body]])))
    together(clients)
    sender.send(Case("warm-up", "grpc", "/inference.GRPCInferenceService/ServerLive", [""]))
    sender.close()
