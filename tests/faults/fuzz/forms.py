"""Forms of the server that the fuzzer drives: TLS, API keys, several front ends, drafts."""

from __future__ import annotations

import base64
import http.client
import random
import re
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases import Case
from pieces import Piece

FORMS = ("tls", "keys", "front-ends", "drafts")
KEY, CHAT_KEY, ADMIN = "k" * 32, "c" * 32, "the value of the admin key"
_KEYS = f"honest all {KEY}\nchat inference {CHAT_KEY}\nanonymous health\n"
_RESTRICTED = "logging,trace,model-repository:admin-key"
_BASIC = base64.b64encode(f"honest:{KEY}".encode()).decode()
_SHOWN = (
    *[f"Bearer {KEY}"] * 6, f"Basic {_BASIC}", f"Bearer {CHAT_KEY}", f"Bearer {KEY[1:]}",
    "Bearer " + "k" * 5000, "Basic " + "k" * 3000, "Basic !!!", "Bearer", "",
)  # fmt: skip
_HEAD = re.compile(r"[^\r\n]* HTTP/1\.[01]\r\n")


@dataclass(frozen=True)
class Access:
    """How a client reaches a server."""

    root_cert: str = ""
    """The authority of the server's certificate; empty: the ports are not encrypted."""
    key: str = ""
    """An API key that may do all; empty: the server asks for none."""

    @property
    def headers(self) -> dict[str, str]:
        """What an honest request shows."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def connection(self, port: int, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to the HTTP port."""
        if not self.root_cert:
            return http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        context = self.context()
        return http.client.HTTPSConnection(
            "127.0.0.1", port, timeout=timeout_s, context=context
        )

    def context(self, *protocols: str) -> ssl.SSLContext:
        """TLS of a client that offers these protocols."""
        context = ssl.create_default_context(cafile=self.root_cert)
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    def shown(self, case: Case) -> Case:
        """The case with a key, which is the right one in most cases. A case has the same key
        each time."""
        if not self.key:
            return case
        rng = random.Random(f"{case.name} {len(case.parts)} {case.weight}")
        shown, shows_admin = rng.choice(_SHOWN), rng.random() < 0.5
        if case.method:
            metadata = [*case.metadata]
            if shown:
                metadata.append(["authorization", shown])
            if shows_admin:
                metadata.append(["triton-grpc-protocol-admin-key", ADMIN])
            return replace(case, metadata=metadata)
        lines = f"Authorization: {shown}\r\n" if shown else ""
        lines += f"admin-key: {ADMIN}\r\n" if shows_admin else ""
        if case.port == "metrics" or not case.parts:
            return case
        return replace(case, parts=[_with_lines(case.parts[0], lines), *case.parts[1:]])


def _with_lines(part: Piece, lines: str) -> Piece:
    """A request with more lines in its head; other bytes as they are."""
    if isinstance(part, list) and part:
        return [_with_lines(part[0], lines), *part[1:]]
    if isinstance(part, str) and (found := _HEAD.match(part)):
        return part[: found.end()] + lines + part[found.end() :]
    return part


def flags_of(form: str, folder: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The flags of a server of this form, and the fields of its `Access`."""
    make: Callable[[Path], tuple[tuple[str, ...], dict[str, Any]]] = {
        "tls": _tls, "keys": _keys, "front-ends": _front_ends, "drafts": _drafts,
    }[form]  # fmt: skip
    return make(folder)


def _front_ends(_: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    return ("--frontend-processes", "2"), {}


def _drafts(_: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    # Requests bring drafts too, and `tensorrt_llm_bls` asks for them (`VALUES`).
    return ("--speculative-decoding", "lookahead", "--max-draft-tokens", "6"), {}


VALUES = {"drafts": {"tensorrt_llm_draft_model_name": "tensorrt_llm"}}
"""Values of the repository's configurations for a form."""


def _keys(folder: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    keys, admin = folder / "keys", folder / "admin"
    keys.write_text(_KEYS)
    admin.write_text(ADMIN)
    restricted = f"{_RESTRICTED}=file:{admin}"
    flags = (
        "--api-keys", str(keys), f"--http-restricted-api={restricted}",
        f"--grpc-restricted-protocol={restricted}",
    )  # fmt: skip
    return flags, {"key": KEY}


def _tls(folder: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    key, cert = folder / "server.key", folder / "server.crt"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(key), "-out", str(cert),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    flags: tuple[str, ...] = ()
    for protocol in ("http", "grpc"):
        flags += (
            f"--{protocol}-use-ssl", "true", f"--{protocol}-server-cert", str(cert),
            f"--{protocol}-server-key", str(key),
        )  # fmt: skip
    return flags, {"root_cert": str(cert)}


def client_hello(access: Access) -> bytes:
    """The first bytes of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = access.context("h2").wrap_bio(incoming, outgoing, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake waits for the server")
