"""Announces that a server is ready: the printed endpoints, and the ready file."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.placement.preflight import endpoints

logger = logging.getLogger(__name__)

_TITLES = {
    "http": "HTTP",
    "grpc": "gRPC",
    "metrics": "Metrics",
    "openai": "OpenAI",
    "admin": "Admin",
    "admin-grpc": "Admin gRPC",
}
_QUESTION = "What is machine learning?"
_MAX_TOKENS = 20
_MAX_ANSWER = 64
"""Tokens of a chat, and for a prompt of the operator, which probably suits the model."""

_PATHS = {"metrics": "/metrics", "openai": "/v1"}
"""Where the endpoints of a port begin."""


def announce(config: ServeConfig, show: Callable[[str], None]) -> None:
    """``show`` the last lines of a start and write the ready file, if configured.

    A file that cannot be written is logged; the server goes on.
    """
    show("\n".join(endpoint_lines(config)) + "\n")
    if not config.ready_file:
        return
    # Written atomically: other programs wait for the file.
    part = Path(f"{config.ready_file}.part")
    try:
        part.write_text(json.dumps(endpoint_urls(config), indent=1) + "\n", encoding="utf-8")
        part.replace(config.ready_file)
    except OSError as error:
        logger.error(
            "--ready-file %s cannot be written (%s): programs that wait for the file wait in "
            "vain, though the server serves. Name a file where there is room.",
            config.ready_file, error.strerror,
        )  # fmt: skip
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def withdraw(config: ServeConfig) -> None:
    """Remove the ready file: the server is ending."""
    if config.ready_file:
        with contextlib.suppress(OSError):
            Path(config.ready_file).unlink(missing_ok=True)


def endpoint_urls(config: ServeConfig) -> dict[str, str]:
    """The open endpoints by name, under this host's name or the only address of each."""
    urls = {}
    for endpoint in endpoints(config.frontend):
        host = _reachable(endpoint.address, everywhere=socket.gethostname())
        urls[endpoint.name] = f"{endpoint.scheme}{host}:{endpoint.port}"
    return urls


def endpoint_lines(config: ServeConfig) -> list[str]:
    """The open endpoints, and requests to paste if a text-level model is served."""
    lines = ["Ready."]
    for endpoint in endpoints(config.frontend):
        host = _reachable(endpoint.address)
        path = _PATHS.get(endpoint.name, "")
        lines.append(
            f"{_TITLES[endpoint.name]:<8} {endpoint.scheme}{host}:{endpoint.port}{path}"
        )
    frontend = config.frontend
    is_secure = frontend.access.http_tls is not None
    if config.ensemble and frontend.allow_http:
        host = f"{_reachable(frontend.http_address)}:{frontend.http_port}"
        path = f"/v2/models/{config.ensemble}/generate"
        prompt = config.example_prompt
        body = {
            "text_input": prompt or _QUESTION,
            "max_tokens": _MAX_ANSWER if prompt else _MAX_TOKENS,
            "bad_words": "",
            "stop_words": "",
        }
        lines.append(_curl("https://" if is_secure else "", host, path, body))
    if config.ensemble and frontend.openai.port:
        host = f"{_reachable(frontend.openai.address)}:{frontend.openai.port}"
        path, body = _openai_request(config)
        lines.append(_curl("https://" if is_secure else "", host, path, body))
        lines.append(f"A page to try it: http{'s' if is_secure else ''}://{host}/chat")
    return lines


def _openai_request(config: ServeConfig) -> tuple[str, dict[str, Any]]:
    """A chat for a model with a chat template, else a text that is continued."""
    model = {"model": config.ensemble}
    folders = [Path(tokenizer.folder) for tokenizer in config.tokenizers]
    if config.frontend.openai.chat_template or any(map(_has_chat_template, folders)):
        messages = [{"role": "user", "content": _QUESTION}]
        chat = {**model, "messages": messages, "max_tokens": _MAX_ANSWER, "temperature": 0}
        return "/v1/chat/completions", chat
    text = {**model, "prompt": _QUESTION, "max_tokens": _MAX_TOKENS, "temperature": 0}
    return "/v1/completions", text


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists():
        return True
    with contextlib.suppress(OSError, ValueError):
        values = parse_json(read_text(folder / "tokenizer_config.json"))
        return isinstance(values, dict) and bool(values.get("chat_template"))
    return False


def _curl(scheme: str, host: str, path: str, body: dict[str, Any]) -> str:
    return f"curl -X POST {scheme}{host}{path} -d {shlex.quote(json.dumps(body))}"


def _reachable(address: str, everywhere: str = "localhost") -> str:
    """The host name for clients; ``everywhere`` if all addresses of this host are served."""
    if address in ("", "0.0.0.0", "::"):
        return everywhere
    return f"[{address}]" if ":" in address else address
