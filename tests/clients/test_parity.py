"""The protocol compared with a real Triton server, over thousands of generated requests.

The wheel of nvidia-pytriton carries the server. Both servers have the same Python models.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

_PARITY = Path(__file__).parent / "parity"
sys.path[:0] = [str(_PARITY), str(_PARITY.parents[1] / "e2e")]

import grpc_cases  # noqa: E402
import http_cases  # noqa: E402
import restricted_cases  # noqa: E402
from differences import GRPC, HTTP, reason_of, text_of  # noqa: E402
from exchange import HttpServer, wait_ready  # noqa: E402
from grpc_exchange import GrpcServer  # noqa: E402
from http_case import REGION, REGION_BYTES, REGION_TEXT  # noqa: E402
from served import Served, free_ports  # noqa: E402

SEED = 7
_REPORTED = 12
CONTROL = (
    "--model-control-mode", "explicit", "--load-model", "*", "--http-address", "127.0.0.1",
    "--grpc-address", "127.0.0.1", "--allow-gpu-metrics", "false",
    "--http-header-forward-pattern", "^x-told|tell", "--grpc-header-forward-pattern", "^x-told",
)  # fmt: skip


@dataclass(frozen=True)
class Ports:
    """The ports of one server."""

    http: int
    grpc: int


@contextlib.contextmanager
def _real(triton: Path, repository: Path, log: Path, flags: Sequence[str]) -> Iterator[Ports]:
    http, grpc, metrics = free_ports(3)
    server = triton / "pytriton" / "tritonserver"
    command = [
        str(server / "bin" / "tritonserver"), "--model-repository", str(repository),
        "--backend-directory", str(server / "backends"), "--disable-auto-complete-config",
        "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
        *flags,
    ]  # fmt: skip
    env = {**os.environ, "LD_LIBRARY_PATH": str(triton / "nvidia_pytriton.libs")}
    env["PATH"] = f"{triton / 'python' / 'bin'}:{env['PATH']}"
    env.pop("PYTHONPATH", None)
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        wait_ready(http)
        yield Ports(http, grpc)
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@contextlib.contextmanager
def _region() -> Iterator[None]:
    """Shared memory of a client with a string at its start."""
    path = Path("/dev/shm") / REGION.strip("/")
    path.write_bytes(REGION_TEXT.ljust(REGION_BYTES, b"\0"))
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def _pair(triton: Path, folder: Path, *flags: str) -> Iterator[tuple[Ports, Ports]]:
    """The reference and our server, with copies of the same models."""
    for name in ("reference", "ours"):
        shutil.copytree(_PARITY / "models", folder / name)
    # Triton 2.51 always takes memory of clients.
    own = (*flags, "--allow-client-shm", "true")
    served = Served(folder / "ours", flags=own, log_path=folder / "ours.log")
    log = folder / "reference.log"
    with _real(triton, folder / "reference", log, flags) as reference, served:
        yield reference, Ports(served.http_port, served.grpc_port)


@pytest.fixture(scope="module")
def both(
    triton: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ports, Ports]]:
    """The two servers, and memory of a client."""
    with _region(), _pair(triton, tmp_path_factory.mktemp("parity"), *CONTROL) as both:
        yield both


def _explained(table, found):
    """The entries of the table that explain answers, and the answers that none explains."""
    explained, faults = set(), []
    for case, name, reference, ours in found:
        entry = reason_of(table, name, reference, ours)
        if entry is None:
            faults.append(
                f"{case}\n  reference {text_of(reference)}\n  ours      {text_of(ours)}"
            )
        explained.add(entry)
    assert not faults, f"{len(faults)} differences:\n" + "\n".join(faults[:_REPORTED])
    return explained


def _check(table, found):
    """Fail for answers that the table does not explain, and for entries that explain none."""
    explained = _explained(table, found)
    unused = [entry.reason for entry in table if entry not in explained]
    assert not unused, f"no case differs any more by: {unused}"


def _over_http(both, cases):
    """The cases with different answers."""
    with contextlib.ExitStack() as stack:
        reference, ours = (
            stack.enter_context(contextlib.closing(HttpServer(ports.http))) for ports in both
        )
        for case in cases:
            theirs, answer = reference.ask(case), ours.ask(case)
            if theirs != answer:
                yield case, f"{case.group} {case.method} {case.path}", theirs, answer


def _over_grpc(both, cases):
    """The cases with different answers."""
    with contextlib.ExitStack() as stack:
        reference, ours = (
            stack.enter_context(contextlib.closing(GrpcServer(ports.grpc))) for ports in both
        )
        for case in cases:
            theirs, answer = reference.ask(case), ours.ask(case)
            if theirs != answer:
                yield case, f"{case.group} {case.method}", theirs, answer


def test_http_answers_are_those_of_the_reference_but_for_the_table(both):
    _check(HTTP, _over_http(both, http_cases.all_cases(SEED)))


def test_grpc_answers_are_those_of_the_reference_but_for_the_table(both):
    _check(GRPC, _over_grpc(both, grpc_cases.all_cases(SEED)))


def test_restricted_endpoints_answer_as_those_of_the_reference(triton, tmp_path):
    with _pair(triton, tmp_path, *CONTROL, *restricted_cases.FLAGS) as both:
        _explained(HTTP, _over_http(both, restricted_cases.over_http()))
        _explained(GRPC, _over_grpc(both, restricted_cases.over_grpc()))
