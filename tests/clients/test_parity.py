"""The protocol compared with a real Triton server, over thousands of generated requests.

The wheel of nvidia-pytriton carries the server. Both servers have the same Python models.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_PARITY = Path(__file__).parent / "parity"
sys.path[:0] = [str(_PARITY), str(_PARITY.parents[1] / "e2e")]

import grpc_cases  # noqa: E402
import http_cases  # noqa: E402
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
def _real(triton: Path, repository: Path, log: Path) -> Iterator[Ports]:
    http, grpc, metrics = free_ports(3)
    server = triton / "pytriton" / "tritonserver"
    command = [
        str(server / "bin" / "tritonserver"), "--model-repository", str(repository),
        "--backend-directory", str(server / "backends"), "--disable-auto-complete-config",
        "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
        *CONTROL,
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


@pytest.fixture(scope="module")
def both(
    triton: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ports, Ports]]:
    """The reference and our server, with copies of the same models."""
    folder = tmp_path_factory.mktemp("parity")
    for name in ("reference", "ours"):
        shutil.copytree(_PARITY / "models", folder / name)
    # Triton 2.51 always takes memory of clients.
    flags = (*CONTROL, "--allow-client-shm", "true")
    served = Served(folder / "ours", flags=flags, log_path=folder / "ours.log")
    with (
        _region(),
        _real(triton, folder / "reference", folder / "reference.log") as reference,
        served,
    ):
        yield reference, Ports(served.http_port, served.grpc_port)


def _check(table, found):
    """Fail for answers that the table does not explain, and for entries that explain none."""
    explained, faults = set(), []
    for case, name, reference, ours in found:
        entry = reason_of(table, name, reference, ours)
        if entry is None:
            faults.append(
                f"{case}\n  reference {text_of(reference)}\n  ours      {text_of(ours)}"
            )
        explained.add(entry)
    unused = [entry.reason for entry in table if entry not in explained]
    assert not faults, f"{len(faults)} differences:\n" + "\n".join(faults[:_REPORTED])
    assert not unused, f"no case differs any more by: {unused}"


def test_http_answers_are_those_of_the_reference_but_for_the_table(both):
    with contextlib.ExitStack() as stack:
        reference, ours = (
            stack.enter_context(contextlib.closing(HttpServer(ports.http))) for ports in both
        )
        found = []
        for case in http_cases.all_cases(SEED):
            theirs, answer = reference.ask(case), ours.ask(case)
            if theirs != answer:
                found.append((case, f"{case.group} {case.method} {case.path}", theirs, answer))
    _check(HTTP, found)


def test_grpc_answers_are_those_of_the_reference_but_for_the_table(both):
    with contextlib.ExitStack() as stack:
        reference, ours = (
            stack.enter_context(contextlib.closing(GrpcServer(ports.grpc))) for ports in both
        )
        found = []
        for case in grpc_cases.all_cases(SEED):
            theirs, answer = reference.ask(case), ours.ask(case)
            if theirs != answer:
                found.append((case, f"{case.group} {case.method}", theirs, answer))
    _check(GRPC, found)
