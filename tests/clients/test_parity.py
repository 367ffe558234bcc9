"""The protocol compared with a real Triton server, over thousands of generated requests.

The wheel of nvidia-pytriton carries the server. Both servers have the same Python models.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_PARITY = Path(__file__).parent / "parity"
sys.path[:0] = [str(_PARITY), str(_PARITY.parents[1] / "e2e")]

import grpc_cases  # noqa: E402
import http_cases  # noqa: E402
import restricted_cases  # noqa: E402
from differences import GRPC, HTTP, reason_of, text_of  # noqa: E402
from exchange import HttpServer  # noqa: E402
from grpc_exchange import GrpcServer  # noqa: E402
from http_case import REGION, REGION_BYTES, REGION_TEXT  # noqa: E402
from server_pair import MAX_DEATHS, ReferenceEndedError, ServerPair  # noqa: E402

SEED = 7
_REPORTED = 12
CONTROL = (
    "--model-control-mode", "explicit", "--load-model", "*", "--http-address", "127.0.0.1",
    "--grpc-address", "127.0.0.1", "--allow-gpu-metrics", "false",
    "--http-header-forward-pattern", "^x-told|tell", "--grpc-header-forward-pattern", "^x-told",
)  # fmt: skip


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
def pair(triton: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """The two servers, and memory of a client."""
    folder = tmp_path_factory.mktemp("parity")
    with _region(), ServerPair(triton, folder, CONTROL) as pair:
        yield pair


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


def test_http_answers_are_those_of_the_reference_but_for_the_table(pair):
    with pair.compared() as both:
        _check(HTTP, _over_http(both, http_cases.all_cases(SEED)))


def test_grpc_answers_are_those_of_the_reference_but_for_the_table(pair):
    with pair.compared() as both:
        _check(GRPC, _over_grpc(both, grpc_cases.all_cases(SEED)))


def test_restricted_endpoints_answer_as_those_of_the_reference(triton, tmp_path):
    flags = (*CONTROL, *restricted_cases.FLAGS)
    with ServerPair(triton, tmp_path, flags) as pair, pair.compared() as both:
        _explained(HTTP, _over_http(both, restricted_cases.over_http()))
        _explained(GRPC, _over_grpc(both, restricted_cases.over_grpc()))


def test_a_death_of_the_reference_is_named_and_both_servers_are_started_again(triton, tmp_path):
    cases = list(http_cases.routes())[:20]
    with ServerPair(triton, tmp_path, CONTROL) as pair:
        with pytest.raises(ReferenceEndedError) as caught, pair.compared() as both:
            pair.reference.process.kill()
            assert list(_over_http(both, cases)) == []
        assert "ended by SIGKILL. Its log ends:\n" in str(caught.value)
        assert "Started HTTPService" in str(caught.value)
        for _ in range(MAX_DEATHS):
            with pair.compared() as both:
                _explained(HTTP, _over_http(both, cases))
            pair.reference.process.kill()
            pair.reference.process.wait()
        with pytest.raises(ReferenceEndedError):
            pair.ports()
