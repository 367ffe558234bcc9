"""The listening TCP sockets of a server's whole process tree."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil
from chaos_server import ChaosServer


def listeners(server: ChaosServer) -> dict[tuple[str, int], str]:
    """Address and port of every listening TCP socket, and the role of one process that has
    the socket."""
    found: dict[tuple[str, int], str] = {}
    for member in server.members():
        with contextlib.suppress(psutil.Error, OSError):
            for entry in member.process.net_connections("tcp"):
                if entry.status == psutil.CONN_LISTEN:
                    found[entry.laddr.ip, entry.laddr.port] = member.role
    return found


def beyond_loopback(server: ChaosServer) -> dict[tuple[str, int], str]:
    """The listening sockets that other hosts can reach."""
    return {
        (ip, port): role
        for (ip, port), role in listeners(server).items()
        if not _is_loopback(ip)
    }


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
