"""Connections that send nothing or too little, by the thousand, beside a stream and a probe."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator

import pytest
from bystanders import Watched
from served import DEMO_MODEL, Served, init_repo, run_trimaran

pytestmark = pytest.mark.timeout(180)

MAX_GAP_S = 1.0
MAX_GROWTH_MB = 200.0
MAX_OPEN_S = 40.0
"""Longer than each deadline by default, on a busy machine."""

HEAD = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: x\r\n"
SENT = {
    "partial heads": (1500, HEAD),
    "partial bodies": (500, HEAD + b'Content-Length: 1000\r\n\r\n{"text_input": "a'),
    "silent": (500, b""),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("slow")
    engine = folder / "engine"
    done = run_trimaran("build", "--checkpoint", str(DEMO_MODEL), "--output", str(engine))
    assert done.returncode == 0, done.stderr
    fill = f"tokenizer_dir:{DEMO_MODEL},engine_dir:{engine},decoupled_mode:True"
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    with Served(folder / "models", log_path=folder / "serve.log") as served:
        yield served


def test_slow_connections_are_closed_without_effect_on_other_requests(server: Served) -> None:
    with contextlib.ExitStack() as stack:
        assert server.process is not None
        watched = stack.enter_context(Watched(server.http_port, server.process.pid))
        selector = stack.enter_context(selectors.DefaultSelector())
        for what, (count, sent) in SENT.items():
            for _ in range(count):
                sock = socket.create_connection(("127.0.0.1", server.http_port), timeout=60)
                stack.enter_context(sock)
                sock.sendall(sent)
                selector.register(sock, selectors.EVENT_READ, what)
        opened_at = time.monotonic()
        num_left = {what: count for what, (count, _) in SENT.items()}
        while any(num_left.values()):
            assert time.monotonic() - opened_at < MAX_OPEN_S, num_left
            for key, _ in selector.select(1.0):
                # An answer, or the end; behind an answer comes the end.
                if not _receive(key.fileobj):
                    selector.unregister(key.fileobj)
                    num_left[key.data] -= 1
    assert watched.seen.failure == ""
    assert watched.seen.stream_gap_s < MAX_GAP_S
    assert watched.seen.health_s < MAX_GAP_S
    assert watched.seen.grown_mb < MAX_GROWTH_MB


def _receive(sock: object) -> bytes:
    assert isinstance(sock, socket.socket)
    try:
        return sock.recv(1 << 16)
    except ConnectionResetError:
        return b""
