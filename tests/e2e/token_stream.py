"""A client of a token-level model that reads one long greedy stream."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Sequence

from served import Served

_STARTED_AT = 20
"""Tokens after which a stream counts as under way."""


class TokenStream(threading.Thread):
    """Reads a stream to its end; the constructor returns after the start of the stream."""

    def __init__(
        self, server: Served, model: str, prompt: Sequence[int], num_tokens: int
    ) -> None:
        super().__init__(daemon=True)
        self._address = (server.address, server.http_port)
        self._path = f"/v2/models/{model}/generate_stream"
        self._body = {
            "input_ids": list(prompt), "input_lengths": len(prompt),
            "request_output_len": num_tokens, "exclude_input_in_output": True,
            "end_id": -1, "streaming": True,
        }  # fmt: skip
        self._under_way = threading.Event()
        self.tokens: list[int] = []
        self.error = ""
        self.start()
        assert self._under_way.wait(60) and not self.error, self.error

    def run(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=120)
        try:
            connection.request("POST", self._path, json.dumps(self._body))
            reply = connection.getresponse()
            if reply.status != 200:
                self.error = f"{reply.status} {reply.read().decode()}"
            for line in reply:
                if line.startswith(b"data: "):
                    self._take(json.loads(line[len(b"data: ") :]))
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()
            self._under_way.set()

    def finish(self) -> list[int]:
        """All tokens, once the stream has ended without an error."""
        self.join(120)
        assert not self.is_alive()
        assert not self.error, self.error
        return self.tokens

    def _take(self, event: dict[str, object]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        ids = event["output_ids"]
        self.tokens += ids if isinstance(ids, list) else [int(str(ids))]
        if len(self.tokens) >= _STARTED_AT:
            self._under_way.set()
