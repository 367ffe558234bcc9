"""A client during an attack: endless greedy streams and health probes, whose gaps are
measured."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass

from served import Served

_PROBE_S = 0.02
_NUM_TOKENS = 800


@dataclass
class Gaps:
    """The longest waits, in seconds, and what went wrong."""

    stream_s: float = 0.0
    """Between two tokens of a stream."""

    probe_s: float = 0.0
    """For an answer of ``/v2/health/live``."""

    num_tokens: int = 0
    errors: tuple[str, ...] = ()


class Bystander:
    """Streams and probes during the block; `gaps` is complete after the block."""

    def __init__(self, server: Served, model: str = "tensorrt_llm") -> None:
        self._server, self._model = server, model
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self.gaps = Gaps()
        self.texts: set[tuple[int, ...]] = set()
        """The outputs of all whole streams, which must all be alike."""
        self._threads = [
            threading.Thread(target=self._stream_all, daemon=True),
            threading.Thread(target=self._probe_all, daemon=True),
        ]

    def __enter__(self) -> Bystander:
        for thread in self._threads:
            thread.start()
        assert self._has_begun.wait(60), "no token came"
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(
            self._server.address, self._server.http_port, timeout=120
        )

    def _stream_all(self) -> None:
        while not self._is_over.is_set():
            try:
                self._stream()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._failed(f"stream: {error!r}")
        self._has_begun.set()

    def _stream(self) -> None:
        body = {
            "input_ids": [5, 6, 7, 8], "input_lengths": 4, "request_output_len": _NUM_TOKENS,
            "exclude_input_in_output": True, "end_id": -1, "streaming": True, "top_k": 1,
        }  # fmt: skip
        connection = self._connection()
        connection.request(
            "POST", f"/v2/models/{self._model}/generate_stream", json.dumps(body)
        )
        reply = connection.getresponse()
        if reply.status != 200:
            raise ValueError(f"{reply.status} {reply.read().decode()[:200]}")
        last, ids = time.monotonic(), []
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise ValueError(event["error"])
            now = time.monotonic()
            self.gaps.stream_s = max(self.gaps.stream_s, now - last)
            last = now
            found = event["output_ids"]
            ids += found if isinstance(found, list) else [int(str(found))]
            self.gaps.num_tokens += 1
            self._has_begun.set()
            if self._is_over.is_set():
                connection.close()
                return
        self.texts.add(tuple(ids))
        connection.close()

    def _probe_all(self) -> None:
        connection = self._connection()
        while not self._is_over.wait(_PROBE_S):
            began = time.monotonic()
            try:
                connection.request("GET", "/v2/health/live")
                status = connection.getresponse()
                status.read()
                if status.status != 200:
                    self._failed(f"probe: {status.status}")
            except (OSError, http.client.HTTPException) as error:
                self._failed(f"probe: {error!r}")
                connection.close()
                connection = self._connection()
            self.gaps.probe_s = max(self.gaps.probe_s, time.monotonic() - began)
        connection.close()

    def _failed(self, text: str) -> None:
        self.gaps.errors = (*self.gaps.errors, text)
        time.sleep(0.1)
