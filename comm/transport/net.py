"""Reaching one host from another: addresses, and connections that notice its loss."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence

import psutil

from trimaran.comm.errors import ConfigError

DIAL_TIMEOUT_S = 5.0


def own_addresses() -> list[str]:
    """This host's IPv4 addresses: of the interfaces that ``GLOO_SOCKET_IFNAME`` names, or
    else ``NCCL_SOCKET_IFNAME`` in its way, if any of them is here."""
    interfaces = psutil.net_if_addrs()
    selected = _chosen(interfaces) or interfaces
    addresses = [
        entry.address
        for name in selected
        for entry in interfaces[name]
        if entry.family == socket.AF_INET
    ]
    # Loopback last: it only leads to rank 0 where a test takes one host for several.
    return sorted(addresses, key=lambda address: address.startswith("127."))


def _chosen(interfaces: Iterable[str]) -> list[str]:
    """The interfaces that the environment names; none if it names none that is here."""
    exact = _names(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if exact:
        return [name for name in interfaces if name in exact]
    # NCCL's names are beginnings, or whole after a "=", and after a "^" those to leave out.
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = _names(chosen.lstrip("^="))
    if not names:
        return []
    is_exact = chosen.startswith(("=", "^="))
    fits = [n for n in interfaces if n in names or (not is_exact and n.startswith(names))]
    return [n for n in interfaces if n not in fits] if chosen.startswith("^") else fits


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def dial_any(candidates: Sequence[str], port: int) -> socket.socket:
    """A connection to the first of the addresses that answers on that port.

    Raises:
        ConfigError: none answers.
    """
    for address in candidates:
        try:
            return socket.create_connection((address, port), timeout=DIAL_TIMEOUT_S)
        except OSError:
            continue
    raise ConfigError(
        f"none of rank 0's addresses {list(candidates)} answers on port {port}; open the "
        "ports between the hosts or name the interface in GLOO_SOCKET_IFNAME"
    )


def watch_for_lost_host(sock: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other host is gone within about 10 s."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
