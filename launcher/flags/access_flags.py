"""Flags of access control, TLS and connections: Triton's own by name, and Trimaran's."""

from __future__ import annotations

import argparse

from trimaran.comm.files.flag_values import boolean, count, port, positive, seconds
from trimaran.launcher.flags.parser import FlagParser
from trimaran.server.access.config import ConnectionLimits

_SECRET = "VALUE may be env:NAME or file:PATH"
_TITLES = {"http": "HTTP", "grpc": "gRPC"}

OWN_GRPC_OPTIONS = {
    "grpc-max-connection-idle": (
        "grpc.max_connection_idle_ms", "MS", "until a connection without calls ends (600000)"),
    "grpc-handshake-timeout": (
        "grpc.server_handshake_timeout_ms", "MS",
        "for a new connection's handshake, of TLS too (20000)"),
    "grpc-max-connections": (
        "grpc.max_allowed_incoming_connections", "N", "connections of a front end (16384)"),
    "grpc-max-concurrent-streams": (
        "grpc.max_concurrent_streams", "N", "open calls of a connection (4096)"),
}  # fmt: skip
"""gRPC's own name of what a flag sets, and what its help says."""


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Declare these flags, all of them out of the short help."""
    before = {action.dest for action in parser._actions}
    _add_access(parser)
    _add_tls(parser)
    _add_http_limits(parser)
    _add_grpc_limits(parser)
    if isinstance(parser, FlagParser):
        parser.hide(*({action.dest for action in parser._actions} - before))


def own_grpc_options(args: argparse.Namespace) -> dict[str, int]:
    """What was asked of gRPC by Trimaran's flags, by its own names."""
    values = {
        option: getattr(args, name.replace("-", "_"))
        for name, (option, *_) in OWN_GRPC_OPTIONS.items()
    }
    return {option: value for option, value in values.items() if value is not None}


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for flag, metavar, header in (
        ("--http-restricted-api", "API,...:KEY=VALUE", "KEY"),
        ("--grpc-restricted-protocol", "PROTOCOL,...:KEY=VALUE", "triton-grpc-protocol-KEY"),
    ):
        add(flag, action="append", default=[], metavar=metavar,
            help=f"requests of these categories need the header {header}: VALUE; may be given "
            f"several times; {_SECRET}")  # fmt: skip
    add("--api-keys", default="", metavar="FILE",
        help="requests need a key of this file, of lines NAME CATEGORY,... KEY, as "
        "Authorization: Bearer KEY; read again when it changes (no keys)")  # fmt: skip
    add("--admin-address", default="127.0.0.1", metavar="ADDR",
        help="the administration's ports listen here (%(default)s)")  # fmt: skip
    add("--admin-port", type=port, metavar="P",
        help="HTTP port of model repository, trace and log requests, which other ports then "
        "refuse (none of its own)")  # fmt: skip
    add("--admin-grpc-port", type=port, metavar="P", help="the same for gRPC (none of its own)")


def _add_tls(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, title in _TITLES.items():
        add(f"--{name}-use-ssl", type=boolean, default=False, metavar="BOOL",
            help=f"{title}: TLS (false)")  # fmt: skip
        add(f"--{name}-use-ssl-mutual", type=boolean, default=False, metavar="BOOL",
            help=f"{title}: TLS, and clients must show a certificate (false)")  # fmt: skip
        for part, text in (
            ("server-cert", "the server's certificate, read again when it changes"),
            ("server-key", "its key"),
            ("root-cert", "whose certificates clients must show"),
        ):
            add(f"--{name}-{part}", default="", metavar="FILE", help=f"{title}: {text} (PEM)")


def _add_http_limits(parser: argparse.ArgumentParser) -> None:
    limits = ConnectionLimits()
    add = parser.add_argument
    for name, default, text in (
        ("header", limits.header_timeout_s, "a request's head is complete within this time"),
        ("body", limits.body_timeout_s, "a body arrives no slower than --http-min-rate"),
        ("send", limits.send_timeout_s, "a client reads no slower than --http-min-rate"),
        ("idle", limits.idle_timeout_s, "a connection without a request is kept so long"),
    ):
        over = " over this time" if name in ("body", "send") else ""
        add(f"--http-{name}-timeout", type=seconds, default=default, metavar="S",
            help=f"{text}{over}, or it is closed; 0: no limit (%(default)g)")  # fmt: skip
    add("--http-min-rate", type=count, default=limits.min_rate, metavar="BYTES",
        help="bytes a second below which a connection has stalled (%(default)s)")  # fmt: skip
    add("--http-max-connections", type=positive, default=limits.max_connections, metavar="N",
        help="open connections of a front end; further ones get 503 (%(default)s)")  # fmt: skip


def _add_grpc_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, (_, metavar, text) in OWN_GRPC_OPTIONS.items():
        add(f"--{name}", type=positive, metavar=metavar, help=f"gRPC: {text}")
    add("--grpc-max-calls", type=positive, default=16384, metavar="N",
        help="open calls of a front end, or RESOURCE_EXHAUSTED (%(default)s)")  # fmt: skip
    add("--grpc-message-timeout", type=seconds, default=300.0, metavar="S",
        help="a unary call's message comes in this time; 0: any (%(default)g)")  # fmt: skip
    add("--grpc-send-timeout", type=seconds, default=60.0, metavar="S",
        help="a stream's client takes a message so soon; 0: any (%(default)g)")  # fmt: skip
