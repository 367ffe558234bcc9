"""From the flags of access control to its configuration, checked before anything starts."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

from trimaran.comm.errors import ConfigError
from trimaran.launcher.resolution.openai import openai_restrictions
from trimaran.server.access.api_keys import read_keys
from trimaran.server.access.config import AccessConfig, ConnectionLimits
from trimaran.server.access.restrictions import (
    GRPC_PREFIX,
    parse_restrictions,
    secret_variables,
)
from trimaran.server.access.tls import TlsFiles, make_context
from trimaran.server.config import FrontendConfig

_LOAD = "model-repository"


def access_config(args: argparse.Namespace) -> AccessConfig:
    """The permissions of clients, by port.

    Raises:
        ConfigError: flags that do not go together, or files that do not hold what they should.
    """
    admin_ports = args.admin_port, args.admin_grpc_port
    if args.admin_address != "127.0.0.1" and admin_ports == (None, None):
        raise ConfigError(
            f"--admin-address {args.admin_address} has no effect without a port of the "
            "administration. Add --admin-port, or leave it out."
        )
    config = AccessConfig(
        http_restrictions=parse_restrictions(
            args.http_restricted_api, "--http-restricted-api", environ=os.environ
        ),
        openai_restrictions=parse_restrictions(
            openai_restrictions(args), "--openai-restricted-api", environ=os.environ
        ),
        grpc_restrictions=parse_restrictions(
            args.grpc_restricted_protocol, "--grpc-restricted-protocol",
            prefix=GRPC_PREFIX, environ=os.environ,
        ),
        api_keys=os.path.abspath(args.api_keys) if args.api_keys else "",
        admin_address=args.admin_address,
        admin_port=args.admin_port,
        admin_grpc_port=args.admin_grpc_port,
        http_tls=_tls(args, "http"),
        grpc_tls=_tls(args, "grpc"),
    )  # fmt: skip
    if config.api_keys:
        read_keys(config.api_keys)
    return config


def connection_limits(args: argparse.Namespace) -> ConnectionLimits:
    """Deadlines and bounds of HTTP connections."""
    return ConnectionLimits(
        header_timeout_s=args.http_header_timeout,
        body_timeout_s=args.http_body_timeout,
        send_timeout_s=args.http_send_timeout,
        idle_timeout_s=args.http_idle_timeout,
        min_rate=args.http_min_rate,
        max_connections=args.http_max_connections,
    )


def forget_secrets(args: argparse.Namespace, environ: MutableMapping[str, str]) -> None:
    """Remove the variables that hold values of restrictions: child processes inherit none."""
    openai = [f":{key}={value}" for _, key, value in args.openai_restricted_api]
    for settings in (args.http_restricted_api, args.grpc_restricted_protocol, openai):
        for name in secret_variables(settings):
            environ.pop(name, None)


def open_port_warnings(config: FrontendConfig) -> Iterator[str]:
    """Warnings of ports on which every client may load models, which may be code."""
    if config.model_control_mode != "explicit":
        return
    access = config.access
    http = _Listener("http", config.allow_http, config.http_address, access.admin_port)
    grpc = _Listener("grpc", config.allow_grpc, config.grpc_address, access.admin_grpc_port)
    openai = _Listener("openai", config.openai.port is not None, config.openai.address, None)
    for listener, flag, restrictions, tls in (
        (http, "--http-restricted-api", access.http_restrictions, access.http_tls),
        (grpc, "--grpc-restricted-protocol", access.grpc_restrictions, access.grpc_tls),
        (openai, "--openai-restricted-api", access.openai_restrictions, access.http_tls),
    ):
        is_guarded = access.api_keys or _LOAD in restrictions or (tls and tls.is_mutual)
        if access.has_admin:
            is_open, where = (
                listener.admin_port is not None,
                f"--admin-address {access.admin_address}",
            )
            is_near = is_loopback(access.admin_address)
        else:
            is_open, where = listener.is_open, f"--{listener.name}-address {listener.address}"
            is_near = is_loopback(listener.address)
        if is_open and not is_guarded and not is_near:
            yield (
                f"--model-control-mode explicit on {where}: every client that reaches it "
                "may load models, and with them code that runs as this user. Use "
                f"{flag} {_LOAD}{listener.form}, --api-keys FILE, an administration port "
                "(--admin-port), or an address of this host alone (127.0.0.1)."
            )


class _Listener(NamedTuple):
    name: str
    is_open: bool
    address: str
    admin_port: int | None

    @property
    def form(self) -> str:
        """The end of a restriction."""
        return " KEY VALUE" if self.name == "openai" else ":KEY=VALUE"


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def tls_notes(args: argparse.Namespace) -> Iterator[str]:
    """Files of TLS that were given and change nothing, for the log."""
    for name in ("http", "grpc"):
        if _value(args, name, "root_cert") and not _value(args, name, "use_ssl_mutual"):
            yield (
                f"--{name}-root-cert has no effect without --{name}-use-ssl-mutual: clients "
                "show no certificate"
            )


def _tls(args: argparse.Namespace, name: str) -> TlsFiles | None:
    is_mutual = bool(_value(args, name, "use_ssl_mutual"))
    paths = {
        part: str(_value(args, name, part))
        for part in ("server_cert", "server_key", "root_cert")
    }
    given = [f"--{name}-{part.replace('_', '-')}" for part, path in paths.items() if path]
    if not is_mutual and not _value(args, name, "use_ssl"):
        if given:
            raise ConfigError(
                f"{', '.join(given)}: the port is not encrypted. Add --{name}-use-ssl true, or "
                "leave the files out."
            )
        return None
    needed = ("server_cert", "server_key", *(["root_cert"] if is_mutual else []))
    for part in needed:
        if not paths[part]:
            flag = f"--{name}-use-ssl{'-mutual' if is_mutual else ''}"
            raise ConfigError(f"{flag} needs --{name}-{part.replace('_', '-')} FILE (PEM).")
    cert, key, root = (os.path.abspath(path) if path else "" for path in paths.values())
    files = TlsFiles(cert, key, root, is_mutual)
    make_context(files, name)
    return files


def _value(args: argparse.Namespace, name: str, part: str) -> object:
    return getattr(args, f"{name}_{part}")
