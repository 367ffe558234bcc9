"""Sends cases to a server and says what came back."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cases import Case
from forms import Access, client_hello
from pieces import build

PATIENCE_S = 20.0
"""How long a client waits that does not leave before."""
MAX_KEPT = 1 << 14
INTERNAL = "internal error"
"""What the server calls its own bugs."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"^content-length: *(\d+)\r$", re.IGNORECASE | re.MULTILINE)
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    kind: str
    """The status of HTTP or gRPC, or what became of the connection."""
    text: str = ""
    """The start of the answer."""

    @property
    def is_bug(self) -> bool:
        """Whether the server says that something was not the client's mistake."""
        return INTERNAL in self.text or self.kind == "UNKNOWN"


_ENCRYPTED = {"http": "http/1.1", "openai": "http/1.1", "grpc": "h2"}
"""The ports that may be encrypted, and what their clients offer."""


@dataclass(frozen=True)
class Ports:
    """The ports of a server on this host."""

    http: int
    grpc: int
    metrics: int
    access: Access = field(default_factory=Access)
    openai: int = 0
    """0: closed."""

    def channel(self) -> grpc.Channel:
        """A gRPC channel of its own connection."""
        address = f"127.0.0.1:{self.grpc}"
        if not self.access.root_cert:
            return grpc.insecure_channel(address, _OPTIONS)
        root = Path(self.access.root_cert).read_bytes()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(root), _OPTIONS)

    def connect(self, case: Case) -> socket.socket:
        """A connection for the bytes of a case. Where the port is encrypted, some connections
        are not, and some end amid the handshake."""
        port: int = getattr(self, case.port)
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        if not self.access.root_cert or case.port not in _ENCRYPTED:
            return sock
        rng = random.Random(f"{case.name} {len(case.parts)} {case.weight}")
        roll = rng.random()
        if roll < 0.1:
            return sock
        try:
            if roll < 0.15:
                hello = bytearray(client_hello(self.access))
                hello[rng.randrange(len(hello))] ^= 0xFF
                sock.sendall(hello[: rng.choice((1, 5, 100, len(hello)))])
                return sock
            protocols = (_ENCRYPTED[case.port],) if roll < 0.9 else ()
            context = self.access.context(*protocols)
            return context.wrap_socket(sock, server_hostname="localhost")
        except BaseException:
            sock.close()
            raise


class Sender:
    """One client, which sends one case at a time."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._channel: grpc.Channel | None = None

    def close(self) -> None:
        """Close all open connections."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def send(self, case: Case) -> Outcome:
        """Send a case, and wait for its end."""
        case = self._ports.access.shown(case)
        parts = [build(part) for part in case.parts]
        if case.method:
            return self._call(case, parts)
        try:
            return _Connection(case, self._ports).run(parts)
        except ConnectionRefusedError:
            return Outcome("refused")

    def _call(self, case: Case, parts: list[bytes]) -> Outcome:
        if self._channel is None:
            self._channel = self._ports.channel()
        metadata: list[tuple[str, Any]] = [
            (key, value.encode() if key.endswith("-bin") else value)
            for key, value in case.metadata
        ]
        call: Any
        if case.is_stream:
            open_stream = self._channel.stream_stream(case.method)
            call = open_stream(_messages(case, parts), timeout=PATIENCE_S, metadata=metadata)
        else:
            begin = self._channel.unary_unary(case.method)
            call = begin.future(parts[0], timeout=PATIENCE_S, metadata=metadata)
        leaves = None
        if case.leaves_after_s is not None:
            leaves = threading.Timer(case.leaves_after_s, call.cancel)
            leaves.start()
        try:
            return _answer(case, call)
        finally:
            if leaves is not None:
                leaves.cancel()


def _messages(case: Case, parts: list[bytes]) -> Iterator[bytes]:
    for number, part in enumerate(parts):
        if number:
            time.sleep(case.pause_s)
        yield part


def _answer(case: Case, call: Any) -> Outcome:
    kept = ""
    try:
        if case.is_stream and not case.reads:
            time.sleep(case.leaves_after_s or 0.0)
            call.cancel()
            return Outcome("CANCELLED")
        if not case.is_stream:
            call.result()
        else:
            for message in call:
                if INTERNAL.encode() in message:
                    kept += message.decode(errors="replace")
    except grpc.FutureCancelledError:
        return Outcome("CANCELLED")
    except grpc.RpcError as error:
        return Outcome(error.code().name, kept + str(error.details())[:300])
    return Outcome("OK", kept[:300])


class _Connection:
    """A connection with the bytes of a case."""

    def __init__(self, case: Case, ports: Ports) -> None:
        self._case = case
        self._sock = ports.connect(case)
        patience_s = PATIENCE_S if case.leaves_after_s is None else case.leaves_after_s
        self._end_s = time.monotonic() + patience_s
        self._kept = b""
        self._tail = b""
        self._num_bytes = 0
        self._is_internal = False

    def run(self, parts: list[bytes]) -> Outcome:
        with self._sock:
            with contextlib.suppress(OSError):
                # The server may answer and close before it has read all bytes.
                self._write(parts)
            if not self._case.reads:
                time.sleep(max(0.0, self._end_s - time.monotonic()))
                return Outcome("never read")
            is_over = self._read()
        found = _STATUS.match(self._kept)
        text = INTERNAL if self._is_internal else self._kept.decode(errors="replace")[-300:]
        if found is not None:
            return Outcome(found.group(1).decode(), text)
        if is_over:
            return Outcome("closed", text)
        return Outcome("left" if self._case.leaves_after_s is not None else "unanswered", text)

    def _write(self, parts: list[bytes]) -> None:
        for number, part in enumerate(parts):
            if number:
                time.sleep(self._case.pause_s)
            # A client that leaves early sends all its bytes first, unless sending takes long.
            self._sock.settimeout(max(0.5, self._end_s - time.monotonic()))
            self._sock.sendall(part)
        if self._case.half_closes:
            self._sock.shutdown(socket.SHUT_WR)

    def _read(self) -> bool:
        """Read to the end of the answer; False: its time is over before."""
        while (left_s := self._end_s - time.monotonic()) > 0:
            self._sock.settimeout(left_s)
            try:
                part = self._sock.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError:
                return True
            if not part:
                return True
            self._num_bytes += len(part)
            self._is_internal |= INTERNAL.encode() in self._tail[-50:] + part
            self._kept += part[: MAX_KEPT - len(self._kept)]
            self._tail = (self._tail + part)[-64:]
            if self._case.leaves_after_s is None and self._is_whole():
                return True
        return False

    def _is_whole(self) -> bool:
        head, found, _ = self._kept.partition(b"\r\n\r\n")
        if not found:
            return False
        length = _LENGTH.search(head + b"\r\n")
        if length is not None:
            return self._num_bytes >= len(head) + 4 + int(length.group(1))
        return self._tail.endswith(b"0\r\n\r\n")
