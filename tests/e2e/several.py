"""A server with several front ends, each of which a test can address."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import psutil
from served import Served

from tests.processes import runs

DEADLINE_S = 60


class Several(Served):
    """A server with several front ends, each of which a test can address."""

    def frontends(self) -> list[psutil.Process]:
        """The front ends that run, in the order of their start."""
        children = psutil.Process(self.process.pid).children()
        found = [c for c in children if runs(c, "trimaran-frontend")]
        return sorted(found, key=lambda each: each.create_time())

    def named(self, index: int) -> psutil.Process:
        """The front end of this number."""
        tag = f":frontend-{index}" if index else ":frontend"
        (found,) = [f for f in self.frontends() if f.environ().get("TRIMARAN_GROUP") == tag]
        return found

    def ranks(self) -> list[psutil.Process]:
        """The ranks that run."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [c for c in below if runs(c, "trimaran-rank")]

    def connect(self, index: int) -> http.client.HTTPConnection:
        """An open connection to the front end of this number."""
        pid = self.named(index).pid
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            connection = http.client.HTTPConnection(self.address, self.http_port, timeout=60)
            connection.request("GET", "/v2/health/live")
            connection.getresponse().read()
            port = connection.sock.getsockname()[1]
            theirs = psutil.Process(pid).net_connections("tcp")
            if any(each.raddr and each.raddr.port == port for each in theirs):
                return connection
            connection.close()
        raise AssertionError(f"no connection reached front end {index}")

    def connect_all(self) -> list[http.client.HTTPConnection]:
        """An open connection to each front end, since finding one can take a while."""
        return [self.connect(index) for index in range(len(self.frontends()))]

    def call(self, index: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of a request to the front end of this number."""
        return self.ask(self.connect(index), method, path, body)

    def ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> tuple[int, Any]:
        """Status and JSON of a request on a connection, which is closed."""
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content) if content else None

    def succeeded(self, index: int) -> int:
        """Requests to the ensemble that the statistics of one front end count."""
        status, document = self.call(index, "GET", "/v2/models/ensemble/stats")
        assert status == 200, document
        return int(document["model_stats"][0]["inference_stats"]["success"]["count"])
