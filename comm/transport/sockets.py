"""Sockets between our processes: addresses, frames on a byte stream, and other hosts."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trimaran.comm.env import SUPERVISOR
from trimaran.comm.errors import ConfigError, ProtocolError

_LENGTH = struct.Struct("<I")
MessageT = TypeVar("MessageT")
DIAL_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a process listens: ``path`` for Unix, host and port for TCP."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``unix:/path`` or ``tcp:host:port``.

        Raises:
            ConfigError: neither form.
        """
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            return cls(path=rest)
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdigit():
            return cls(host=host, port=int(port))
        raise ConfigError(f"address {text!r} is neither unix:/path nor tcp:host:port")

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"

    def connect(self, timeout_s: float) -> socket.socket:
        """A connected blocking socket with that time limit on every call.

        Raises:
            OSError: no listener answers there within ``timeout_s``.
        """
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                sock.connect(self.path)
            except OSError:
                sock.close()
                raise
        else:
            sock = socket.create_connection((self.host, self.port), timeout=timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def listen(self, backlog: int = 128) -> socket.socket:
        """A listening socket; a Unix one is readable by this user only."""
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(self.path)
        else:
            # A port that was chosen before is held by a socket of the same user.
            sock = socket.create_server((self.host, self.port), reuse_port=bool(self.port))
        sock.listen(backlog)
        return sock


def frame(body: bytes) -> bytes:
    """A whole frame, length included."""
    return frame_head(len(body)) + body


def frame_head(num_bytes: int) -> bytes:
    """What stands in a frame before a body of so many bytes."""
    return _LENGTH.pack(num_bytes)


class FrameCutter(Generic[MessageT]):
    """Cuts a byte stream into messages. One a connection; not thread safe."""

    def __init__(self, decode: Callable[[bytes], MessageT], max_bytes: int) -> None:
        """``decode`` reads a body of at most ``max_bytes``, which may change later."""
        self._decode = decode
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Add received bytes; return the messages that are now complete.

        Raises:
            ProtocolError: a frame is too long or undecodable.
        """
        self._buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self.max_bytes:
                raise ProtocolError(
                    f"a frame of {length} bytes is over the limit of {self.max_bytes}"
                )
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            with memoryview(self._buffer) as view:
                body = bytes(view[start + _LENGTH.size : end])
            messages.append(self._decode(body))
            start = end
        del self._buffer[:start]
        return messages


def own_addresses() -> list[str]:
    """This host's IPv4 addresses: of the interfaces that ``GLOO_SOCKET_IFNAME`` names, or
    else ``NCCL_SOCKET_IFNAME`` in NCCL's syntax, if any of them exists here."""
    import psutil  # only where ranks are on several hosts

    interfaces = psutil.net_if_addrs()
    selected = _chosen(interfaces) or interfaces
    addresses = [
        entry.address
        for name in selected
        for entry in interfaces[name]
        if entry.family == socket.AF_INET
    ]
    # Loopback last: loopback leads to rank 0 only in tests that treat one host as several.
    return sorted(addresses, key=lambda address: address.startswith("127."))


def listen_address() -> str:
    """The IPv4 address of this host on which a rank listens for ranks of other hosts.

    One of `own_addresses`: the address that leads to the supervisor, or the first address.
    """
    candidates = own_addresses()
    toward = _address_toward(os.environ.get(SUPERVISOR, ""))
    return toward if toward in candidates else candidates[0]


def _address_toward(supervisor: str) -> str:
    """The address from which this host reaches a supervisor on TCP; empty for another one."""
    if not supervisor.startswith("tcp:"):
        return ""
    address = Address.parse(supervisor)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address.host, address.port))  # sends nothing: the kernel routes
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def _chosen(interfaces: Iterable[str]) -> list[str]:
    """The interfaces that the environment selects; empty for all."""
    exact = _names(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if exact:
        return [name for name in interfaces if name in exact]
    # NCCL's names are prefixes; after a "=" they are whole names, and after a "^" excluded
    # names.
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = _names(chosen.lstrip("^="))
    if not names:
        return []
    is_exact = chosen.startswith(("=", "^="))
    fits = [n for n in interfaces if n in names or (not is_exact and n.startswith(names))]
    return [n for n in interfaces if n not in fits] if chosen.startswith("^") else fits


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def dial(host: str, port: int) -> socket.socket:
    """A connection to rank 0, which listens at that address for ranks of other hosts.

    Raises:
        ConfigError: rank 0 does not answer.
    """
    try:
        return socket.create_connection((host, port), timeout=DIAL_TIMEOUT_S)
    except OSError as error:
        raise ConfigError(
            f"rank 0 does not answer at {host} on port {port} ({error}); open the ports "
            "between the hosts, or name the interface between them in GLOO_SOCKET_IFNAME"
        ) from error


def watch_for_lost_host(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection within about 10 s after the loss of the other
    host."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
