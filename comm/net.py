"""Reaching one host from another: addresses, and connections that notice its loss."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import psutil

from trimaran.comm.errors import ConfigError

DIAL_TIMEOUT_S = 5.0


def own_addresses() -> list[str]:
    """This host's IPv4 addresses; those of ``GLOO_SOCKET_IFNAME`` alone if it is set."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name.lstrip("=^") for name in chosen.split(",") if name]
    interfaces = psutil.net_if_addrs()
    selected = {name: interfaces[name] for name in names if name in interfaces} or interfaces
    addresses = [
        entry.address
        for entries in selected.values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    # Loopback last: it only leads to rank 0 where a test takes one host for several.
    return sorted(addresses, key=lambda address: address.startswith("127."))


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
