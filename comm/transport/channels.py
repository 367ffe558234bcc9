"""Options of clients' gRPC channels: a server of this machine is reached without a proxy."""

from __future__ import annotations

import ipaddress

NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Without this option gRPC sends what goes to this machine itself through the proxy that
``http_proxy``, ``https_proxy`` or ``grpc_proxy`` name."""


def is_loopback(url: str) -> bool:
    """Whether the host of ``HOST:PORT`` is this machine itself."""
    host = url.rpartition(":")[0] if url.count(":") == 1 or url.startswith("[") else url
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # What a server listens on is reached over the loopback interface.
    return address.is_loopback or address.is_unspecified


def channel_options(url: str) -> list[tuple[str, int]]:
    """The channel options for this address, with messages of any size."""
    sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return [*sizes, NO_PROXY] if is_loopback(url) else sizes
