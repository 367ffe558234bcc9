"""Sending a case to a server, and what of its answer clients look at."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import time
import zlib
from typing import Any

from http_case import HttpCase

HEADERS = (
    "Content-Type",
    "Content-Encoding",
    "Accept-Encoding",
    "Inference-Header-Content-Length",
)
VARYING = ("ns", "count", "last_inference", "inference_count", "execution_count", "batch_size")


class HttpServer:
    """A connection to one server, opened again when it is closed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, case: HttpCase) -> dict[str, Any]:
        """The answer to a case, reduced to what is compared."""
        try:
            return self._ask(case)
        except TimeoutError:
            self.close()
            return {"status": "no answer in time"}
        except (http.client.HTTPException, OSError):
            # An idle connection may have been closed meanwhile: once more on a new one.
            self.close()
        try:
            return self._ask(case)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            return {"status": f"no answer: {type(error).__name__}"}

    def _ask(self, case: HttpCase) -> dict[str, Any]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=4)
        connection = self._connection
        connection.putrequest(case.method, case.path, skip_accept_encoding=True)
        for name, value in case.headers.items():
            connection.putheader(name, value)
        if case.method in ("POST", "PUT", "PATCH") or case.body:
            connection.putheader("Content-Length", str(len(case.body)))
        connection.endheaders(case.body or None)
        response = connection.getresponse()
        raw = response.read()
        answer: dict[str, Any] = {"status": response.status}
        for name in HEADERS:
            if response.headers.get(name) is not None:
                answer[name] = response.headers[name]
        if response.status >= 400 and not answer.get("Content-Type", "").startswith(
            "text/event"
        ):
            # JSON whatever it is called: clients do not look.
            answer.pop("Content-Type", None)
        if response.headers.get("Connection", "").lower() == "close":
            self.close()
        answer["body"] = body_of(raw, answer)
        if case.path.endswith("/unload") and response.status == 200:
            self._wait_unloaded()
        return answer

    def _wait_unloaded(self) -> None:
        """Return when no model is being unloaded: servers answer before that."""
        index = HttpCase("", "POST", "/v2/repository/index")
        end = time.monotonic() + 10
        while "UNLOADING" in str(self._ask(index)["body"]) and time.monotonic() < end:
            time.sleep(0.01)


def body_of(raw: bytes, headers: dict[str, Any]) -> Any:
    """The body decoded: JSON as values, blobs as hexadecimal text, events as a list."""
    coding = headers.get("Content-Encoding")
    try:
        raw = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(coding, bytes)(raw)
    except (OSError, zlib.error):
        return raw.hex()
    length = headers.get("Inference-Header-Content-Length")
    if length is not None:
        size = int(length)
        return [steady(json.loads(raw[:size])), raw[size:].hex()]
    text = raw.decode(errors="backslashreplace")
    if headers.get("Content-Type", "").startswith("text/event-stream"):
        return [_json(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]
    return _json(text)


def _json(text: str) -> Any:
    try:
        return steady(json.loads(text))
    except ValueError:
        return text


def steady(value: Any) -> Any:
    """Without times and counts, which differ between two runs."""
    if isinstance(value, dict):
        return {key: "?" if key in VARYING and not isinstance(member, dict) else steady(member)
                for key, member in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [steady(member) for member in value]
    if isinstance(value, str):
        return re.sub(r"/tmp/[\w./-]+", "<path>", value)
    return value


def wait_ready(port: int, timeout_s: float = 120) -> None:
    """Return once a server is ready."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            ) as connection:
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"port {port} was not ready after {timeout_s} s")
