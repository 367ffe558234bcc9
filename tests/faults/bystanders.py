"""The view of other clients while a client sends bad requests, measured in a separate process.

Run as ``python bystanders.py PORT PID``: one long greedy stream after another, a probe of
``/v2/health/live`` every 20 ms, and the memory of the front end. A line on the standard input
ends the program, which then prints its observations as JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import psutil

PROBE_S = 0.02
WEIGHED_MB = 100.0
"""Growth of all resident memory from which pages that processes share are counted once."""
PROMPT = {"text_input": "It was a dark and", "stop_words": "", "bad_words": ""}


@dataclass(frozen=True)
class Seen:
    """The worst observations of other clients."""

    stream_gap_s: float
    """The longest time between two events of the stream."""
    health_s: float
    """The longest time until a health probe was answered."""
    num_events: int
    num_probes: int
    grown_mb: float
    """By how much the memory of the front end and its helpers grew at most."""
    failure: str
    """What went wrong with the stream or the probe; empty if nothing did."""


class Bystanders:
    """The stream, the probe and the scales."""

    def __init__(self, port: int, pid: int) -> None:
        self._port = port
        self._server = psutil.Process(pid)
        self._is_over = threading.Event()
        self._gap = self._health = 0.0
        self._num_events = self._num_probes = 0
        self._failures: list[str] = []
        self._before = self._before_shared = 0
        self._grown = 0

    def run(self) -> Seen:
        """Look on until a line comes."""
        watches = (self._stream, self._probe, self._weigh)
        threads = [threading.Thread(target=self._guarded, args=(each,)) for each in watches]
        for thread in threads:
            thread.start()
        while self._num_events < 5 and not self._failures:
            time.sleep(PROBE_S)
        # The first events of a stream and start-up effects do not count.
        self._gap = self._health = 0.0
        self._before, self._before_shared = self._memory("rss"), self._memory("pss")
        self._grown = 0
        print("ready", flush=True)
        sys.stdin.readline()
        self._is_over.set()
        for thread in threads:
            thread.join()
        return Seen(
            self._gap,
            self._health,
            self._num_events,
            self._num_probes,
            self._grown / 1e6,
            "; ".join(self._failures),
        )

    def _guarded(self, watch) -> None:
        try:
            watch()
        except Exception as error:
            self._failures.append(f"{watch.__name__}: {type(error).__name__}: {error}")

    def _stream(self) -> None:
        body = json.dumps({**PROMPT, "max_tokens": 800, "end_id": -1, "stream": True})
        while not self._is_over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            connection.request("POST", "/v2/models/ensemble/generate_stream", body)
            reply = connection.getresponse()
            last = time.monotonic()
            while (line := reply.readline()) and not self._is_over.is_set():
                if line.startswith(b"data:"):
                    if b'"error"' in line:
                        raise RuntimeError(line.decode())
                    now = time.monotonic()
                    self._gap = max(self._gap, now - last)
                    last = now
                    self._num_events += 1
            self._gap = max(self._gap, time.monotonic() - last)
            connection.close()

    def _probe(self) -> None:
        while not self._is_over.is_set():
            begun = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
            connection.request("GET", "/v2/health/live")
            status = connection.getresponse().status
            connection.close()
            if status != 200:
                raise RuntimeError(f"/v2/health/live answers {status}")
            took = time.monotonic() - begun
            self._health = max(self._health, took)
            self._num_probes += 1
            time.sleep(max(0.0, PROBE_S - took))

    def _weigh(self) -> None:
        while not self._is_over.is_set():
            before, before_shared = self._before, self._before_shared
            if before:
                grown = self._memory("rss") - before
                if grown > WEIGHED_MB * 1e6:
                    grown = self._memory("pss") - before_shared
                self._grown = max(self._grown, grown)
            time.sleep(0.1)

    def _memory(self, of: str) -> int:
        """Memory of the front end and its helpers, of which each new one maps the same
        libraries. A rank's memory grows during the first use of its cache."""
        total = 0
        for process in self._server.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "trimaran-rank" not in " ".join(process.cmdline()):
                    info = process.memory_info() if of == "rss" else process.memory_full_info()
                    total += int(getattr(info, of))
        return total


class Watched:
    """Bystanders around a block: ``seen`` is there at its end."""

    seen: Seen

    def __init__(self, port: int, pid: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Watched:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            out, _err = self._process.communicate("over\n", timeout=150)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        self.seen = Seen(**json.loads(out))


if __name__ == "__main__":
    print(json.dumps(Bystanders(int(sys.argv[1]), int(sys.argv[2])).run().__dict__))
