"""Front ends that stall, hang and die: the server goes on, and the log says what they did."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chaos_server import ChaosServer, Member
from models import Model, build_repository
from waiting import wait_until

BASE = Model("base", "base")
HANG_TIMEOUT_S, STALL_TIMEOUT_S = 4.0, 12.0
FLAGS = (
    "--dtype", "float32", "--num-threads", "1", "--max-restarts", "1", "--no-mpi",
    "--frontend-processes", "2", "--hang-timeout", str(HANG_TIMEOUT_S),
    "--stall-timeout", str(STALL_TIMEOUT_S),
)  # fmt: skip
NUM_TOKENS = 1000
NUM_SEQUENCES = 128
"""Two full batches: the engine takes far longer than `FREED_S` for all their tokens."""
FREED_S = 5.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosServer]:
    """Two front ends, one rank, and a single restart within ten minutes."""
    folder = tmp_path_factory.mktemp("deaths")
    repository = build_repository(folder, (BASE,))
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parent / "stalls"), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("TRIMARAN_TEST_STALL", str(folder / "stall"))
        served = ChaosServer(repository, 1, flags=FLAGS, multi_model=False, folder=folder)
        with served:
            yield served


@pytest.fixture
def second(server: ChaosServer) -> Member:
    """The second front end, once both serve."""
    server.wait_until(lambda: is_up(server), "two front ends that serve")
    return server.find("front end", ":frontend-1")[0]


def is_up(server: ChaosServer) -> bool:
    """Whether both front ends live and serve."""
    living = {member.group: member.pid for member in server.find("front end")}
    # Read after the processes: the lines of a process that is found may still be to come, and a
    # front end that was killed before it served has one line alone.
    log = server.log()
    return set(living) == {":frontend", ":frontend-1"} and all(
        re.search(rf"\b{name}: started pid {pid}\n(?s:.)*\b{name}: ready\n", log)
        for name, pid in (
            ("front end", living[":frontend"]),
            ("front end 1", living[":frontend-1"]),
        )
    )


def stall(server: ChaosServer, member: Member, how: str, seconds: float) -> None:
    """Have a front end hold up its event loop."""
    (server.folder / "stall").write_text(f"{how} {seconds}")
    os.kill(member.pid, signal.SIGUSR2)


class Stream(threading.Thread):
    """Streams of tokens at one front end, one after the other over one connection, each read to
    its end, until `finish` or a failure."""

    def __init__(self, connection: http.client.HTTPConnection, num_sequences: int = 1) -> None:
        super().__init__(daemon=True)
        self._num_sequences = num_sequences
        self._connection = connection
        self._is_over = threading.Event()
        self.times: list[float] = []
        """The time of each event."""
        self.num_tokens: list[int] = []
        """The tokens of each stream."""
        self.error = ""
        self._first = self._ask()
        self.start()

    def _ask(self) -> http.client.HTTPResponse:
        body = {
            "input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": NUM_TOKENS,
            "end_id": -1, "streaming": True, "exclude_input_in_output": True,
            "num_return_sequences": self._num_sequences,
        }  # fmt: skip
        self._connection.request("POST", "/v2/models/base/generate_stream", json.dumps(body))
        answer = self._connection.getresponse()
        assert answer.status == 200
        return answer

    def run(self) -> None:
        """Note when each event came, and count the tokens of each stream."""
        answer = self._first
        try:
            while True:
                self._read(answer)
                if self._is_over.is_set():
                    return
                answer = self._ask()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            answer.close()
            self._connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        self.num_tokens.append(0)
        for line in answer:
            if line.startswith(b"data: "):
                self.times.append(time.monotonic())
                ids = json.loads(line[6:])["output_ids"]
                self.num_tokens[-1] += len(ids) if isinstance(ids, list) else 1

    def finish(self) -> None:
        """Wait for the end of the stream that runs."""
        self._is_over.set()
        self.join(60)

    def check(self) -> None:
        """Each stream was whole."""
        assert self.error == ""
        assert set(self.num_tokens) == {NUM_TOKENS * self._num_sequences}

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)


def stream_at(server: ChaosServer, pid: int, num_sequences: int = 1) -> Stream:
    """A stream at that front end."""
    process = psutil.Process(pid)
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        own = connection.sock.getsockname()
        if any(each.raddr == own for each in process.net_connections("tcp")):
            return Stream(connection, num_sequences)
        connection.close()
    raise AssertionError("all connections came to the other front end")


def other(server: ChaosServer, member: Member) -> int:
    """The pid of the other front end."""
    return next(each.pid for each in server.find("front end") if each.pid != member.pid)


def active_requests(server: ChaosServer) -> float:
    samples = server.samples("nv_trt_llm_request_metrics")
    return sum(value for labels, value in samples if labels["request_type"] == "active")


@pytest.mark.parametrize(
    ("how", "function"), [("python", "stalls_in_python"), ("c", "stalls_in_c")]
)
def test_a_short_stall_is_in_the_log_with_its_stacks_and_kills_nothing(
    server, second, how, function
):
    here = stream_at(server, second.pid)
    there = stream_at(server, other(server, second))
    told = server.log().count(function)

    stall(server, second, how, 3.5)

    server.wait_log(function, told + 1)
    here.finish()
    there.finish()
    here.check()
    there.check()
    assert there.longest_gap_s < 1.5 < here.longest_gap_s
    assert second.process.is_running()


def test_a_computing_front_end_has_a_longer_timeout_than_an_idle_front_end(server, second):
    began = time.monotonic()
    stall(server, second, "python", 600)
    server.wait_log("but computes: it has until 12 s (--stall-timeout)")
    server.wait_log("has stalled: it computes, but gave no sign of life for 12 s")
    assert time.monotonic() - began > STALL_TIMEOUT_S - 1

    server.wait_until(lambda: is_up(server), "a new front end")
    hung = server.find("front end", ":frontend-1")[0]
    stall(server, hung, "sleep", 600)
    server.wait_log(
        f"front end 1 (pid {hung.pid}) has hung: no sign of life for 4 s and no work"
    )
    # Asked for just before the kill.
    assert "stalls_in_sleep" in server.log()
    server.wait_until(lambda: is_up(server), "a new front end")


def test_streams_of_a_dead_front_end_end_and_are_freed_in_the_engine(server, second):
    there = stream_at(server, other(server, second))
    here = stream_at(server, second.pid, NUM_SEQUENCES)
    wait_until(lambda: len(here.times) > 5 and len(there.times) > 5, "tokens on both")
    server.wait_until(
        lambda: active_requests(server) >= NUM_SEQUENCES, "all sequences in the engine"
    )

    second.process.kill()

    here.join(10)
    assert not here.is_alive(), "the client of a dead front end got no closed connection"
    server.wait_until(
        lambda: active_requests(server) < NUM_SEQUENCES,
        "requests of the dead front end dropped",
        timeout_s=FREED_S,
    )
    there.finish()
    there.check()
    server.wait_until(lambda: is_up(server), "a new front end")


def test_deaths_of_a_front_end_do_not_end_the_server(server):
    for _ in range(5):
        server.wait_until(lambda: is_up(server), "two front ends that serve")
        for member in server.find("front end"):
            member.process.kill()
        # The supervisor has noticed both.
        time.sleep(0.5)
    server.wait_until(lambda: is_up(server), "two front ends that serve")

    assert server.is_ready()
    assert server.end() == 0
