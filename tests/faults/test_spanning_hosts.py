"""One worker group over two hosts: a stage or a dp rank on each, and what a partition does."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos_server import ChaosServer
from hosts_lab import HostsLab
from hosts_server import HostsServer
from models import Case, Model, build_repository, make_cases, with_answers

NAME = "wide"
ALONE = (Model(NAME, "base"),)
EXPERTS_ALONE = (Model(NAME, "moe"),)
EXPERTS = (Model(NAME, "moe", num_dp_ranks=2, num_nodes=2),)
WIDE = (Model(NAME, "base", tp_size=2, pp_size=2, num_nodes=2),)
HANG_TIMEOUT_S = 4.0
NOTICED_S = 2 * HANG_TIMEOUT_S
BACK_S = 60.0
GONE_S = 20.0
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--hang-timeout", str(HANG_TIMEOUT_S))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model of two stages of two ranks."""
    return build_repository(tmp_path_factory.mktemp("wide"), WIDE)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Requests with the answers of one rank; the first is long enough to meet a fault."""
    return cases_of(ALONE, tmp_path_factory.mktemp("alone"))


def cases_of(models: tuple[Model, ...], folder: Path) -> list[Case]:
    """Requests, and what one rank answers."""
    asked = [Case(NAME, (0, 547, 1319), 500), *make_cases(models, 7, longest=60)]
    repository = build_repository(folder, models)
    with ChaosServer(repository, flags=FLAGS[:4], folder=folder) as alone:
        return with_answers(asked, alone)


@pytest.fixture
def lab() -> Iterator[HostsLab]:
    """Two hosts."""
    with HostsLab() as hosts:
        yield hosts


def serve(repository: Path, lab: HostsLab, folder: Path, *flags: str, **fields) -> HostsServer:
    """The group on both hosts, in leader mode unless ``fields`` say otherwise."""
    fields = {"multi_model": False, "world_size": 4, **fields}
    flags = (*FLAGS, *flags)
    return HostsServer(repository, flags=flags, folder=folder, lab=lab, **fields)


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)


def answer(server: HostsServer, case: Case) -> tuple[int, object]:
    """Status, and the ids or the error."""
    path = f"/v2/models/{case.model}/generate"
    status, reply = server.post(path, case.body(streaming=False), timeout_s=120)
    return status, tuple(reply["output_ids"]) if status == 200 else reply["error"]


def answers(server: HostsServer, cases: list[Case]) -> list[tuple[int, object]]:
    """Those of all at once."""
    found: dict[int, tuple[int, object]] = {}

    def ask(number: int) -> None:
        found[number] = answer(server, cases[number])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[number] for number in range(len(cases))]


class Running:
    """A request that runs beside the test, from its first token on."""

    def __init__(self, server: HostsServer, case: Case) -> None:
        self._server, self._case = server, case
        self.events: list[dict[str, object]] = []
        self.error = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        wait_until(lambda: bool(self.events), 30.0, "a first token")

    def _read(self) -> None:
        path = f"/v2/models/{self._case.model}/generate_stream"
        body = json.dumps(self._case.body(streaming=True)).encode()
        request = urllib.request.Request(self._server.url(path), data=body)
        with urllib.request.urlopen(request, timeout=120) as reply:
            for line in reply:
                if line.startswith(b"data: "):
                    self._take(json.loads(line[len(b"data: ") :]))

    def _take(self, event: dict[str, object]) -> None:
        self.error = str(event.get("error", ""))
        self.events.append(event)

    def finish(self, timeout_s: float = 120) -> tuple[int, ...]:
        """All ids that came."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"
        ids: list[int] = []
        for event in self.events:
            new = event.get("output_ids", [])
            ids += new if isinstance(new, list) else [new]
        return tuple(ids)


def assert_nothing_is_left(lab: HostsLab) -> None:
    for name in lab.hosts:
        wait_until(
            lambda name=name: not lab.pids(name), GONE_S, f"processes of {name} are gone"
        )
        assert lab.shm_files(name) == []
        assert lab.temporary_files(name) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fields",
    [{"has_host_file": True}, {"multi_model": True}],
    ids=["leader, host file", "orchestrator"],
)
def test_stages_on_two_hosts_answer_as_one_rank(repository, cases, lab, tmp_path, fields):
    with serve(repository, lab, tmp_path, **fields) as server:
        assert [len(server.on_host(name, "rank")) for name in lab.hosts] == [2, 2]
        assert server.metric("trimaran_group_up", model=NAME) == 1
        assert answers(server, cases) == [(200, case.answer) for case in cases]
        assert server.end() == 0
    assert_nothing_is_left(lab)


@pytest.mark.timeout(300)
def test_dp_ranks_on_two_hosts_share_experts_and_notice_a_partition(lab, tmp_path):
    cases = cases_of(EXPERTS_ALONE, tmp_path / "alone")
    repository = build_repository(tmp_path / "dp", EXPERTS)
    fields = {"world_size": 2, "slots": 1}
    with serve(repository, lab, tmp_path, "--max-restarts", "100", **fields) as server:
        assert [len(server.on_host(name, "rank")) for name in lab.hosts] == [1, 1]
        assert answers(server, cases) == [(200, case.answer) for case in cases]
        request = Running(server, cases[0])
        lab.cut("two")
        wait_until(lambda: not server.is_model_ready(NAME), NOTICED_S, "noticed")
        lab.mend("two")
        assert request.finish() == cases[0].answer
        assert server.end() == 0
    assert_nothing_is_left(lab)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_of_the_other_host_is_replaced_and_costs_no_request(
    repository, cases, lab, tmp_path, fault
):
    with serve(repository, lab, tmp_path) as server:
        request = Running(server, cases[0])
        server.on_host("two", "rank")[1].process.send_signal(fault)
        wait_until(lambda: not server.is_model_ready(NAME), NOTICED_S, "noticed")
        assert request.finish() == cases[0].answer
        assert server.end() == 0
    assert_nothing_is_left(lab)


@pytest.mark.timeout(300)
def test_a_request_continues_after_a_partition(repository, cases, lab, tmp_path):
    with serve(repository, lab, tmp_path, "--max-restarts", "100") as server:
        request = Running(server, cases[0])
        lab.cut("two")
        wait_until(lambda: not server.is_model_ready(NAME), NOTICED_S, "noticed")
        wait_until(lambda: not server.on_host("two", "rank"), 3 * NOTICED_S, "ranks end alone")
        lab.mend("two")
        assert request.finish() == cases[0].answer
        assert answer(server, cases[1]) == (200, cases[1].answer)
        assert server.end() == 0
    assert_nothing_is_left(lab)


@pytest.mark.timeout(300)
def test_ranks_that_reach_the_supervisor_but_no_other_rank_are_named(tmp_path):
    stages = Model(NAME, "moe", pp_size=2, num_dp_ranks=2, num_nodes=2)
    repository = build_repository(tmp_path / "stages", (stages,))
    case = Case(NAME, (0, 547, 1319), 900)
    with HostsLab(num_hosts=3) as lab:
        # A dp rank on each of the hosts that are not the supervisor's.
        flags = ("--restart", "never", "--hosts", "two:2,three:2")
        with serve(repository, lab, tmp_path, *flags, has_hosts=False) as server:
            assert [len(server.on_host(name, "rank")) for name in lab.hosts] == [0, 2, 2]
            request = Running(server, case)
            lab.part("two", "three")
            request.finish(BACK_S)
            assert re.search(r"no sum or exchange with rank\(s\) \[\d\]", request.error)
            assert server.process.wait(GONE_S) == 1
        for name in lab.hosts:
            # The folder of a daemon of MPI that was killed stays.
            wait_until(
                lambda name=name: not lab.pids(name), GONE_S, f"processes of {name} are gone"
            )
            assert lab.shm_files(name) == []


@pytest.mark.timeout(300)
def test_a_partition_that_lasts_ends_in_an_error_and_never_in_a_hang(
    repository, cases, lab, tmp_path
):
    with serve(repository, lab, tmp_path, "--max-restarts", "1") as server:
        request = Running(server, cases[0])
        lab.cut("two")
        wait_until(lambda: not server.is_model_ready(NAME), NOTICED_S, "noticed")
        ids = request.finish(BACK_S)
        assert ids == cases[0].answer[: len(ids)]
        assert f"the engine of model '{NAME}' is gone" in request.error
        assert server.process.wait(GONE_S) == 1
        assert "not started again" in server.log()
        wait_until(lambda: not server.on_host("two", "rank"), GONE_S, "ranks end alone")
        # MPI's daemon notices the partition at the first packet that arrives again.
        lab.mend("two")
        wait_until(lambda: not lab.pids("two"), GONE_S, "processes of two are gone")
