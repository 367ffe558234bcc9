"""Addresses of our own listeners: ``unix:/path`` or ``tcp:host:port``."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from trimaran.comm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """Where one of our processes listens. ``path`` for Unix, host and port for TCP."""

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
            OSError: nobody listens there within ``timeout_s``.
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
