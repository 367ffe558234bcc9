"""What the operator asks of access control and of connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimaran.server.access.restrictions import Restriction
from trimaran.server.access.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """The permissions of clients, by port; by default every client may do everything."""

    http_restrictions: Mapping[str, Restriction] = field(default_factory=dict)
    """By category, over HTTP."""

    openai_restrictions: Mapping[str, Restriction] = field(default_factory=dict)
    """By category, on the OpenAI port."""

    grpc_restrictions: Mapping[str, Restriction] = field(default_factory=dict)
    api_keys: str = ""
    """File of API keys; empty means that no key is asked for."""

    admin_address: str = "127.0.0.1"
    admin_port: int | None = None
    """Administration port, HTTP; None means the serving port."""

    admin_grpc_port: int | None = None
    http_tls: TlsFiles | None = None
    grpc_tls: TlsFiles | None = None

    @property
    def has_admin(self) -> bool:
        """Whether the administration has a port of its own."""
        return self.admin_port is not None or self.admin_grpc_port is not None

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> AccessConfig:
        """The inverse of `dataclasses.asdict`."""
        values = dict(wire)
        for name in ("http_restrictions", "openai_restrictions", "grpc_restrictions"):
            values[name] = {key: Restriction(**each) for key, each in values[name].items()}
        for name in ("http_tls", "grpc_tls"):
            values[name] = TlsFiles(**values[name]) if values[name] is not None else None
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Deadlines and bounds of the HTTP connections of one port; a deadline of 0 is none."""

    header_timeout_s: float = 20.0
    """A request's head is complete within this time, as is a TLS handshake."""

    body_timeout_s: float = 30.0
    """A body brings at least `min_rate` bytes a second, averaged over each such time."""

    send_timeout_s: float = 60.0
    """A client with a full send buffer reads at least `min_rate` bytes a second, likewise."""

    idle_timeout_s: float = 600.0
    """A connection without a request is kept for this time after the last one."""

    min_rate: int = 500
    """Bytes a second below which a body, or the reading of an answer, counts as stalled."""

    max_connections: int = 16384
    """Open connections of one front end's port."""
