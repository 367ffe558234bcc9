"""Signals, deaths and ends of the real processes, watched from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from served import BIN, InJob, Served, command_env

GONE_IDLE_S = 5
GONE_KILLED_S = 10
NUM_TOKENS = 300
UNDER_WAY = 20
"""Events after which a stream is in its midst."""
STREAM = "/v2/models/ensemble/generate_stream"
BODY = {
    "text_input": "It was a bright cold day", "max_tokens": NUM_TOKENS, "stream": True,
    "bad_words": "", "stop_words": "",
}  # fmt: skip


class Stream(threading.Thread):
    """A client that reads one long stream, which is in its midst after the constructor."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self._port = server.http_port
        self.started = threading.Event()
        self.text = ""
        self.num_events = 0
        self.error = ""
        self.start()
        assert self.started.wait(60) and self.num_events >= UNDER_WAY, self.error

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("POST", STREAM, json.dumps(BODY))
            reply = connection.getresponse()
            for line in reply:
                if line.startswith(b"data: "):
                    self._take(json.loads(line[len(b"data: ") :]))
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)
        finally:
            connection.close()
            self.started.set()

    def finish(self) -> str:
        """The whole text, once the stream has ended."""
        self.join(120)
        assert not self.is_alive()
        return self.text

    def _take(self, event: dict[str, str]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        self.text += event["text_output"]
        self.num_events += 1
        if self.num_events == UNDER_WAY:
            self.started.set()


@pytest.fixture(scope="module")
def repository(
    demo_engine: Callable[[int], Path], make_repository: Callable[..., Path]
) -> Path:
    """The demo model for two ranks."""
    return make_repository(demo_engine(2))


@pytest.fixture(scope="module")
def server(exact_server: Served, leader_tokens: list[int]) -> Served:
    """One server for the faults of several tests; the last test ends the server."""
    assert leader_tokens
    return exact_server


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> str:
    """The text of these tests' stream without a fault."""
    return Stream(server).finish()


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start servers of two ranks that are ended with the test."""
    started: list[Served] = []

    def start(*flags: str) -> Served:
        log = tmp_path / f"serve-{len(started)}.log"
        started.append(Served(repository, 2, ("--dtype", "float32", *flags), log))
        started[-1].start()
        started[-1].wait_ready()
        return started[-1]

    yield start
    for server in started:
        server.kill()


def find(server: Served, name: str, number: int = 0) -> psutil.Process:
    """One process of the tree: ``mpirun``, ``front end`` or ``rank``, the latter by pid."""
    programs = {"mpirun": "prterun", "front end": "trimaran-frontend", "rank": "trimaran-rank"}
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        # Some of them end while they are looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            words = [os.path.basename(word) for word in process.cmdline()[:2]]
            if programs[name] in words[: 1 if name == "mpirun" else 2]:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)[number]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    ("victim", "number", "told"),
    [
        ("rank", 0, "rank 0 (pid {pid} on {host}) was killed by signal 9 (SIGKILL)"),
        ("rank", 1, "rank 1 (pid {pid} on {host}) was killed by signal 9 (SIGKILL)"),
        ("mpirun", 0, "mpirun (pid {pid}) was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_stream_survives_the_death_of_its_engine(server, undisturbed, victim, number, told):
    server.wait_ready()
    before = [find(server, "rank", 0), find(server, "rank", 1)]
    dead = find(server, victim, number)
    stream = Stream(server)
    dead.kill()
    server.wait_log(told.format(pid=dead.pid, host=os.uname().nodename))
    assert stream.finish() == undisturbed, stream.error
    assert not any(process.is_running() for process in before)
    assert server.is_ready()


def test_a_hung_rank_is_noticed_and_its_group_restarted(server, undisturbed):
    server.wait_ready()
    server.record_tree()
    hung = find(server, "rank", 1)
    num_restarts = server.log().count("restart in")
    stream = Stream(server)
    hung.suspend()
    server.wait_log("restart in", num_restarts + 1)
    assert stream.finish() == undisturbed, stream.error
    assert hung not in server.survivors()


def test_a_dead_engine_is_not_ready_and_refuses_with_a_retry_time(server):
    server.wait_ready()
    num_restarts = server.log().count("restart in")
    find(server, "rank", 1).kill()
    server.wait_log("restart in", num_restarts + 1)
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port)) as connection:
        connection.request("GET", "/v2/health/ready")
        ready = connection.getresponse()
        ready.read()
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps(BODY))
        refused = connection.getresponse()
        refused.read()
    assert (ready.status, refused.status) == (400, 503)
    assert int(refused.headers["Retry-After"]) >= 1
    server.wait_ready()


def test_a_killed_front_end_restarts_and_reconnects_to_the_engine(server, undisturbed):
    server.wait_ready()
    ranks = {find(server, "rank", 0).pid, find(server, "rank", 1).pid}
    dead = find(server, "front end")
    stream = Stream(server)
    dead.kill()
    server.wait_log(f"front end (pid {dead.pid}) was killed by signal 9 (SIGKILL)")
    stream.finish()
    server.wait_ready()
    assert {find(server, "rank", 0).pid, find(server, "rank", 1).pid} == ranks
    assert Stream(server).finish() == undisturbed


def test_a_second_server_refuses_the_ports_of_the_first(server, repository):
    server.wait_ready()
    second = subprocess.run(
        [str(BIN / "trimaran"), "serve", "--model-repo", str(repository), "--http-port",
         str(server.http_port), "--grpc-port", "1", "--metrics-port", "2"],
        capture_output=True, text=True, env=command_env(), timeout=60,
    )  # fmt: skip
    assert second.returncode == 2
    assert f"--http-port {server.http_port}: the port is in use by pid" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert server.is_ready()


def test_a_draining_server_finishes_its_streams_and_refuses_new_requests(server, undisturbed):
    server.wait_ready()
    server.record_tree()
    stream = Stream(server)
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("draining")
    assert stream.finish() == undisturbed
    assert server.wait_ended() == 0
    server.wait_gone(GONE_IDLE_S)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_exits_within_5_seconds_of_a_signal(serve, number):
    server = serve()
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port)) as idle:
        idle.request("GET", "/v2/health/ready")
        idle.getresponse().read()
        server.record_tree()
        server.process.send_signal(number)
        server.wait_gone(GONE_IDLE_S)
    assert server.wait_ended() == 0
    assert "ERROR" not in server.log()


def test_a_second_signal_ends_a_busy_server_at_once(serve):
    server = serve()
    stream = Stream(server)
    server.record_tree()
    server.process.send_signal(signal.SIGINT)
    server.wait_log("draining")
    server.process.send_signal(signal.SIGINT)
    server.wait_gone(GONE_IDLE_S)
    assert server.wait_ended() in (0, 128 + signal.SIGINT)
    stream.finish()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("victim", ["rank", "mpirun", "front end"])
def test_without_restarts_a_death_ends_the_server_with_code_1(serve, victim):
    server = serve("--restart", "never")
    server.record_tree()
    dead = find(server, victim)
    Stream(server)
    dead.kill()
    server.wait_gone(GONE_KILLED_S)
    assert server.wait_ended() == 1
    assert "was killed by signal 9 (SIGKILL); not started again" in server.log()


def test_no_process_outlives_the_supervisor(serve):
    server = serve()
    Stream(server)
    assert len(server.record_tree()) == 5
    server.process.kill()
    server.wait_gone(GONE_KILLED_S)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("delay_s", [0.4, 0.8, 1.2, 2.0])
def test_no_process_outlives_a_supervisor_killed_during_the_start(
    repository, tmp_path, delay_s
):
    server = Served(repository, 2, log_path=tmp_path / "serve.log")
    server.start()
    time.sleep(delay_s)
    server.record_tree()
    server.process.kill()
    server.wait_gone(GONE_KILLED_S)
    server.kill()


@pytest.mark.matrix(keep=0)
def test_a_full_disk_at_the_logs_stops_no_process(repository, undisturbed):
    # The flag without effect is logged before the log has a pipe.
    flags = ("--dtype", "float32", "--log-file", "/dev/full", "--force")
    server = Served(repository, 2, flags, Path("/dev/full"))
    with server:
        assert Stream(server).finish() == undisturbed
        assert server.stop() == 0


def test_one_rank_serves_without_mpirun(
    demo_engine: Callable[[int], Path], make_repository: Callable[..., Path], tmp_path: Path
):
    log = tmp_path / "serve.log"
    with Served(make_repository(demo_engine(1)), 1, ("--no-mpi",), log) as server:
        assert Stream(server).finish()
        names = {process.name() for process in server.seen.values()}
        assert "prterun" not in names
        assert server.stop() == 0
        server.wait_gone(GONE_IDLE_S)


def test_tasks_of_a_foreign_mpirun_become_one_server(repository, tmp_path, undisturbed):
    with InJob(repository, 2, ("--dtype", "float32"), tmp_path / "serve.log") as server:
        assert Stream(server).finish() == undisturbed
        supervisors = [p for p in server.seen.values() if p.name() == "trimaran"]
        assert len(supervisors) == 1
        supervisors[0].send_signal(signal.SIGTERM)
        server.wait_gone(2 * GONE_IDLE_S)
        assert server.wait_ended() == 0


def test_a_configuration_error_ends_every_task_of_a_foreign_mpirun(repository, tmp_path):
    server = InJob(repository, 3, (), tmp_path / "serve.log")
    server.start()
    assert server.wait_ended(60) != 0
    assert "this MPI job has 3 tasks but" in server.log()
    server.kill()
