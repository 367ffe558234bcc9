"""Descriptors used up, a full disk, signals under load, a killed mpirun: nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_server import ChaosServer
from leftovers import left_over
from load import CANCELLED, FAILED, LOST, RETRYABLE, RIGHT, WRONG, Load, running
from models import Case, Model, build_repository, make_cases, with_answers
from shm import PrivateShm

PAIR = Model("pair", "base", tp_size=2)
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--restart-window", "5")
MAX_FILES = 300
DISK = "4m"
NUM_CLIENTS = 12
GONE_S = 20.0
IN_TRANSIT_S = 0.5
"""A request sent this long before a signal has arrived before the signal."""

pytestmark = pytest.mark.timeout(600)


class FewFiles(PrivateShm):
    """Lets each process of the server open a few files only."""

    @property
    def prefix(self) -> list[str]:
        """See `Shm`."""
        return [*super().prefix, "prlimit", f"--nofile={MAX_FILES}:{MAX_FILES}", "--"]


class SmallDisk(PrivateShm):
    """Puts a small file system on a folder, which only the server sees."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = Path(f"/proc/{self._holder.pid}/root{folder}")
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
        subprocess.run([*self.prefix, *mount], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", 0) as filler:
            while True:
                filler.write(bytes(4096))

    def empty(self) -> None:
        """Free what was filled."""
        (self.folder / "filler").unlink()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of two ranks."""
    return build_repository(tmp_path_factory.mktemp("shortage"), (PAIR,))


@pytest.fixture(scope="module")
def cases(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Requests with the answers of an undisturbed server."""
    folder = tmp_path_factory.mktemp("undisturbed")
    asked = make_cases((PAIR,), 8, longest=300)
    with ChaosServer(
        repository, 2, flags=FLAGS, multi_model=False, folder=folder
    ) as undisturbed:
        return with_answers(asked, undisturbed)


def serve(repository: Path, folder: Path, *flags: str, make_shm=PrivateShm) -> ChaosServer:
    return ChaosServer(
        repository, 2, flags=(*FLAGS, *flags), multi_model=False, folder=folder,
        make_shm=make_shm,
    )  # fmt: skip


def answer(server: ChaosServer, case: Case) -> tuple[int, ...]:
    status, reply = server.post("/v2/models/pair/generate", case.body(streaming=False))
    assert status == 200, reply
    return tuple(reply["output_ids"])


def kill(server: ChaosServer, role: str) -> None:
    """Kill the first process of a role, and wait until the server serves again."""
    victim = server.find(role)[0]
    told = server.log().count(": ready")
    victim.process.kill()
    server.wait_until(lambda: server.log().count(": ready") > told, f"{role} back")
    server.wait_ready()


@contextlib.contextmanager
def idle_connections(server: ChaosServer, count: int) -> Iterator[None]:
    """As many silent connections to the HTTP port as can be opened."""
    socks = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                socks.append(socket.create_connection(("127.0.0.1", server.http_port), 2))
        yield
    finally:
        for sock in socks:
            sock.close()


def test_clients_that_exhaust_file_descriptors_block_no_engine(repository, cases, tmp_path):
    with serve(repository, tmp_path, make_shm=FewFiles) as server:
        with idle_connections(server, 2 * MAX_FILES):
            told = server.log().count("group pair: ready")
            server.find("rank")[0].process.kill()
            server.wait_log("group pair: ready", told + 1)
            time.sleep(2)
        server.wait_ready()

        assert answer(server, cases[0]) == cases[0].answer
        assert server.log().count("front end: started pid") == 1
        assert server.end() == 0


def test_a_full_disk_stops_no_request_and_no_restart(repository, cases, tmp_path):
    server = serve(repository, tmp_path)
    disks: list[SmallDisk] = []

    def small_disk() -> SmallDisk:
        # Logs, sockets and the files of MPI lie there.
        disks.append(SmallDisk(server.tmp))
        logs = ("--log-file", f"{server.tmp}/all.log", "--log-dir", f"{server.tmp}/logs")
        server.flags = (*server.flags, *logs)
        return disks[0]

    server.make_shm = small_disk
    with server:
        disks[0].fill()
        for case in cases:
            assert answer(server, case) == case.answer
        kill(server, "front end")
        kill(server, "rank")
        assert answer(server, cases[0]) == cases[0].answer
        assert "No space left on device" in server.log()
        disks[0].empty()
        assert server.end() == 0


@pytest.mark.parametrize("is_twice", [False, True], ids=["once", "twice"])
def test_a_signal_under_load_leaves_no_request_unanswered(
    repository, cases, tmp_path, is_twice
):
    with serve(repository, tmp_path, "--exit-timeout", "10") as server:
        load = Load(server, cases, NUM_CLIENTS, deadline_s=30, cancelled_share=0)
        with running(load):
            time.sleep(5)
            stopped_s = time.monotonic()
            server.process.terminate()
            if is_twice:
                time.sleep(0.2)
                server.process.terminate()
            code = server.process.wait(GONE_S)
            load.is_stopping = True
        running_then = [o for o in load.outcomes if o.start_s < stopped_s - IN_TRANSIT_S]
        later = [o for o in load.outcomes if o.start_s >= stopped_s - IN_TRANSIT_S]

        assert code == (128 + signal.SIGTERM if is_twice else 0), server.log()
        assert running_then
        kinds = Counter(outcome.kind for outcome in running_then)
        # An interrupted stream may end early, but must not look complete.
        allowed = {RIGHT, *({RETRYABLE, LOST, FAILED, WRONG} if is_twice else ())}
        assert kinds[RIGHT] and set(kinds) <= allowed, running_then
        # An idle connection is closed, and no further connection is accepted.
        refused = [o for o in later if o.kind not in (RIGHT, RETRYABLE, LOST)]
        if not is_twice:
            assert all("has stopped accepting new" in o.text for o in refused), refused
        assert left_over(server) == []


def test_a_killed_mpirun_under_load_costs_no_request(repository, cases, tmp_path):
    with serve(repository, tmp_path) as server:
        load = Load(server, cases, NUM_CLIENTS, deadline_s=60, cancelled_share=0)
        with running(load):
            for _ in range(2):
                time.sleep(3)
                kill(server, "starter")
            time.sleep(3)
        kinds = Counter(outcome.kind for outcome in load.outcomes)

        assert set(kinds) <= {RIGHT, RETRYABLE, CANCELLED}, kinds
        assert kinds[RIGHT] > NUM_CLIENTS
        assert server.end() == 0
        assert left_over(server) == []


def test_a_signal_during_a_restart_ends_every_process(repository, tmp_path):
    with serve(repository, tmp_path, "--exit-timeout", "5") as server:
        os.kill(server.find("starter")[0].pid, signal.SIGKILL)
        time.sleep(0.7)
        server.process.terminate()
        server.process.wait(GONE_S)

        assert left_over(server) == []
