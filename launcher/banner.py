"""What `trimaran serve` prints once it serves: endpoints and a request to paste."""

from __future__ import annotations

import json

from trimaran.launcher.config import ServeConfig
from trimaran.launcher.preflight import endpoints

_TITLES = {"http": "HTTP", "grpc": "gRPC", "metrics": "Metrics"}


def print_endpoints(config: ServeConfig) -> None:
    """Print the last lines of a start. Nobody reading them is no reason to stop."""
    try:
        print("\n".join(endpoint_lines(config)), flush=True)
    except OSError:
        pass


def endpoint_lines(config: ServeConfig) -> list[str]:
    """The open endpoints, and the curl line where a text-level model is served."""
    lines = ["Ready."]
    for endpoint in endpoints(config.frontend):
        host = _reachable(endpoint.address)
        scheme = "" if endpoint.name == "grpc" else "http://"
        path = "/metrics" if endpoint.name == "metrics" else ""
        lines.append(f"{_TITLES[endpoint.name]:<8} {scheme}{host}:{endpoint.port}{path}")
    frontend = config.frontend
    if config.ensemble and frontend.allow_http:
        body = {
            "text_input": "What is machine learning?",
            "max_tokens": 20,
            "bad_words": "",
            "stop_words": "",
        }
        lines.append(
            f"curl -X POST {_reachable(frontend.http_address)}:{frontend.http_port}"
            f"/v2/models/{config.ensemble}/generate -d '{json.dumps(body)}'"
        )
    return lines


def _reachable(address: str) -> str:
    """A name that a client on this host can use."""
    if address in ("", "0.0.0.0", "::"):
        return "localhost"
    return f"[{address}]" if ":" in address else address
