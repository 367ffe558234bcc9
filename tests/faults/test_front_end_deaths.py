"""Front ends that stall, hang and die: the server goes on, and the log says what they did."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
    log = server.log()
    living = {member.group for member in server.find("front end")}
    return living == {":frontend", ":frontend-1"} and all(
        log.count(f"{name}: started pid") == log.count(f"{name}: ready")
        for name in ("front end", "front end 1")
    )


def stall(server: ChaosServer, member: Member, how: str, seconds: float) -> None:
    """Have a front end hold up its event loop."""
    (server.folder / "stall").write_text(f"{how} {seconds}")
    os.kill(member.pid, signal.SIGUSR2)


class Stream(threading.Thread):
    """A stream of tokens, read to its end, and its front end."""

    def __init__(self, server: ChaosServer) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        self._connection.connect()
        body = {
            "input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": NUM_TOKENS,
            "end_id": -1, "streaming": True, "exclude_input_in_output": True,
        }  # fmt: skip
        self._connection.request("POST", "/v2/models/base/generate_stream", json.dumps(body))
        self.answer = self._connection.getresponse()
        assert self.answer.status == 200
        own = self._connection.sock.getsockname()
        self.pid = next(
            member.pid
            for member in server.find("front end")
            if any(each.raddr == own for each in member.process.net_connections("tcp"))
        )
        self.times: list[float] = []
        self.num_tokens = 0
        self.error = ""
        self.start()

    def run(self) -> None:
        """Note when each event came, and count its tokens."""
        try:
            for line in self.answer:
                if line.startswith(b"data: "):
                    self.times.append(time.monotonic())
                    ids = json.loads(line[6:])["output_ids"]
                    self.num_tokens += len(ids) if isinstance(ids, list) else 1
        except (OSError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.answer.close()
            self._connection.close()

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)


def streams_at(server: ChaosServer, pid: int) -> tuple[Stream, Stream]:
    """A stream at that front end, and a stream at the other front end."""
    here = there = None
    for _ in range(100):
        stream = Stream(server)
        if stream.pid == pid:
            here = here or stream
        else:
            there = there or stream
        if here and there:
            return here, there
    raise AssertionError("all connections came to the same front end")


def active_requests(server: ChaosServer) -> float:
    samples = server.samples("nv_trt_llm_request_metrics")
    return sum(value for labels, value in samples if labels["request_type"] == "active")


@pytest.mark.parametrize(
    ("how", "function"), [("python", "stalls_in_python"), ("c", "stalls_in_c")]
)
def test_a_short_stall_is_in_the_log_with_its_stacks_and_kills_nothing(
    server, second, how, function
):
    here, there = streams_at(server, second.pid)
    told = server.log().count(function)

    stall(server, second, how, 3.5)

    server.wait_log(function, told + 1)
    here.join(60)
    there.join(60)
    assert (here.error, there.error) == ("", "")
    assert here.num_tokens == there.num_tokens == NUM_TOKENS
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
    here, there = streams_at(server, second.pid)
    wait_until(lambda: len(here.times) > 5 and len(there.times) > 5, "tokens on both")
    before = active_requests(server)

    second.process.kill()

    here.join(10)
    assert not here.is_alive(), "the client of a dead front end got no closed connection"
    server.wait_until(
        lambda: active_requests(server) < before or not there.is_alive(),
        "requests of the dead front end dropped",
        timeout_s=5,
    )
    assert there.is_alive()
    there.join(60)
    assert there.num_tokens == NUM_TOKENS
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
