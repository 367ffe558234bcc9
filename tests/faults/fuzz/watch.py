"""The view of other clients, measured in a separate process and reported as it happens.

Run as ``python watch.py HTTP_PORT PID ROOT_CERT KEY``: one greedy stream after another, a
health probe every 20 ms, the memory of the front ends and their helpers, and the front ends'
processes. Each line of its output is an event in JSON. The measurement starts with the line
``begin`` of its input and ends with the next line.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# The program finds its folder also where the interpreter leaves that out (PYTHONSAFEPATH).
sys.path[:0] = [str(Path(__file__).parent)]
from forms import Access  # noqa: E402

PROBE_S = 0.02
WEIGH_S = 0.2
WEIGHED_MB = 100.0
"""From this growth of the resident memory on, shared pages are told from others, which takes
the kernel longer."""
_FIRST_STREAM_S = 180.0
"""For a stream on a host that is busy with other work."""
TOLD_GAP_S = 0.25
"""Shorter gaps are no events."""
PROMPT = {"text_input": "It was a dark and", "max_tokens": 700, "end_id": -1}


class Watch:
    """The stream, the probe and the scales."""

    def __init__(self, port: int, pid: int, access: Access) -> None:
        self._port = port
        self._access = access
        self._server = psutil.Process(pid)
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._lock = threading.Lock()
        self._text = ""
        """The text of the model on an idle server, which every stream must repeat."""
        self._worst: dict[str, float] = {"stream": 0.0, "probe": 0.0}
        self._counts = {"events": 0, "streams": 0, "probes": 0}
        self._members: dict[int, tuple[psutil.Process, str]] = {}
        self._max_mb = self._held_mb = 0.0
        self._held_by: dict[str, float] = {}

    def run(self) -> None:
        """Observe until a line arrives, then report the totals."""
        self._text = self._one_stream()
        self._tell("ready")
        watches = (self._stream, self._probe, self._weigh)
        threads = [threading.Thread(target=self._guarded, args=(each,)) for each in watches]
        for thread in threads:
            thread.start()
        if sys.stdin.readline() == "begin\n":
            self._has_begun.set()
            self._worst = dict.fromkeys(self._worst, 0.0)
            sys.stdin.readline()
        self._is_over.set()
        for thread in threads:
            thread.join()
        gaps = {f"{name}_gap_s": round(gap, 3) for name, gap in self._worst.items()}
        memory: dict[str, Any] = {"grown_mb": self._max_mb, "held_mb": self._held_mb}
        memory["held_by"] = self._held_by
        self._tell("end", **gaps, **self._counts, **memory)

    def _tell(self, event: str, **what: Any) -> None:
        with self._lock:
            print(json.dumps({"event": event, "at": time.monotonic(), **what}), flush=True)

    def _guarded(self, watch: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            try:
                watch()
            except (OSError, http.client.HTTPException, RuntimeError, psutil.Error) as error:
                name = watch.__name__.strip("_")
                self._tell("failure", text=f"{name}: {type(error).__name__}: {error}")
                time.sleep(0.5)

    def _connection(self) -> http.client.HTTPConnection:
        return self._access.connection(self._port, timeout_s=60)

    def _gap(self, of: str, since: float) -> float:
        now = time.monotonic()
        gap = now - since
        self._worst[of] = max(self._worst[of], gap)
        if gap > TOLD_GAP_S:
            self._tell("gap", of=of, seconds=round(gap, 3))
        return now

    def _stream(self) -> None:
        text = self._one_stream()
        if self._is_over.is_set():
            return
        self._counts["streams"] += 1
        if text != self._text:
            pairs = zip(text, self._text, strict=False)
            place = next((n for n, (a, b) in enumerate(pairs) if a != b), len(text))
            self._tell("failure", text=f"stream: another text from character {place} on")

    def _one_stream(self) -> str:
        with contextlib.closing(self._connection()) as connection:
            body = json.dumps({**PROMPT, "stream": True})
            path = "/v2/models/ensemble/generate_stream"
            connection.request("POST", path, body, self._access.headers)
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {reply.read()[:300]!r}")
            text, last = "", time.monotonic()
            while (line := reply.readline()) and not self._is_over.is_set():
                if not line.startswith(b"data:"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise RuntimeError(event["error"])
                last = self._gap("stream", last)
                text += event["text_output"]
                self._counts["events"] += 1
        return text

    def _probe(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            with contextlib.closing(self._connection()) as connection:
                connection.request("GET", "/v2/health/live")
                status = connection.getresponse().status
            if status != 200:
                raise RuntimeError(f"/v2/health/live answers {status}")
            took = self._gap("probe", begun) - begun
            self._counts["probes"] += 1
            time.sleep(max(0.0, PROBE_S - took))

    def _weigh(self) -> None:
        while not (self._has_begun.is_set() or self._is_over.wait(WEIGH_S)):
            pass
        front_ends = self._front_ends()
        before, shared_before = self._memory("rss"), self._memory("pss")
        next_look_s = 0.0
        while not self._is_over.wait(WEIGH_S):
            if time.monotonic() > next_look_s:
                next_look_s = time.monotonic() + 2.0
                if lost := front_ends - self._front_ends():
                    front_ends = self._front_ends()
                    self._tell("failure", text=f"front end: pid {lost} has ended")
            grown_mb = _grown_mb(before, self._memory("rss"))
            if grown_mb > WEIGHED_MB:
                now = self._memory("pss")
                grown_mb = _grown_mb(shared_before, now)
                if grown_mb > self._max_mb + 2.0:
                    largest = _largest(shared_before, now)
                    self._tell("memory", grown_mb=grown_mb, largest=largest)
            self._max_mb, self._held_mb = max(self._max_mb, grown_mb), grown_mb
        self._held_by = _largest(shared_before, self._memory("pss"))

    def _look_around(self) -> None:
        """Find new helpers."""
        self._members = {
            pid: found for pid, found in self._members.items() if found[0].is_running()
        }
        for process in self._server.children(recursive=True):
            if process.pid not in self._members:
                with contextlib.suppress(psutil.Error):
                    self._members[process.pid] = (process, " ".join(process.cmdline()))

    def _front_ends(self) -> set[int]:
        self._look_around()
        return {p for p, (_, line) in self._members.items() if "trimaran-frontend" in line}

    def _memory(self, of: str) -> dict[str, int]:
        """The bytes of each process except ranks, whose caches grow with use."""
        sizes = {}
        for pid, (process, line) in self._members.items():
            if "trimaran-rank" not in line:
                with contextlib.suppress(psutil.Error):
                    info = process.memory_info() if of == "rss" else process.memory_full_info()
                    sizes[f"{pid}: {line[-60:]}"] = int(getattr(info, of))
        return sizes


def _grown_mb(before: dict[str, int], now: dict[str, int]) -> float:
    return round((sum(now.values()) - sum(before.values())) / 1e6, 1)


def _largest(before: dict[str, int], now: dict[str, int]) -> dict[str, float]:
    """The processes that grew most, in MB."""
    differences = {name: now[name] - before.get(name, 0) for name in now}
    most = sorted(differences, key=lambda name: -differences[name])[:3]
    return {name: round(differences[name] / 1e6, 1) for name in most}


class Watching:
    """A watch in a process of its own; ``listen`` gets each of its events, in a thread."""

    def __init__(
        self, port: int, pid: int, listen: Callable[[dict[str, Any]], None], access: Access
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(pid), access.root_cert, access.key],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._listen = listen
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Watching:
        self._thread.start()
        if not self._is_ready.wait(_FIRST_STREAM_S):
            self.__exit__()
            raise RuntimeError(f"no stream came to its end within {_FIRST_STREAM_S:g} s")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._say("over")
            self._process.wait(100)
        self._process.kill()
        self._process.wait()
        self._thread.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def begin(self) -> None:
        """Count from now on."""
        self._say("begin")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._is_ready.set()
            else:
                self._listen(event)


if __name__ == "__main__":
    Watch(int(sys.argv[1]), int(sys.argv[2]), Access(*sys.argv[3:5])).run()
