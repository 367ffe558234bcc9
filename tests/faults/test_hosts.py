"""Worker groups on two hosts: deaths, a partition and a lost host, seen by clients."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chaos import Chaos, Disturbance, model_of
from chaos_server import ChaosServer, Member
from hosts_lab import HostsLab
from hosts_server import HostsServer
from load import RIGHT, Load, running
from models import Case, Model, build_repository, make_cases, with_answers
from soak_run import judge

MODELS = (Model("here", "base", tp_size=2), Model("there", "draft", tp_size=2))
HANG_TIMEOUT_S = 4.0
NOTICED_S = 2 * HANG_TIMEOUT_S
READY_S = 60.0
GONE_S = 10.0
LOST_S = 30.0
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-restarts", "100")
NUM_CLIENTS = 8


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of two ranks, so that each fills a host of two slots."""
    return build_repository(tmp_path_factory.mktemp("hosts"), MODELS)


@pytest.fixture
def lab() -> Iterator[HostsLab]:
    """Two hosts."""
    with HostsLab() as hosts:
        yield hosts


@pytest.fixture
def server(lab: HostsLab, repository: Path, tmp_path: Path) -> Iterator[HostsServer]:
    """The supervisor and one model on host one, the other model on host two."""
    flags = (*FLAGS, "--hang-timeout", str(HANG_TIMEOUT_S))
    with HostsServer(repository, flags=flags, folder=tmp_path, lab=lab) as served:
        yield served


@pytest.fixture(scope="module")
def cases(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Requests, long enough to be met by a fault, with the answers of a server on one host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ChaosServer(repository, flags=FLAGS, folder=folder) as undisturbed:
        return with_answers(make_cases(MODELS, 6, longest=300), undisturbed)


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for an event; returns the seconds."""
    start = time.monotonic()
    while not is_so():
        assert time.monotonic() - start < timeout_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
    return time.monotonic() - start


@contextlib.contextmanager
def disturbed(server: HostsServer, cases: list[Case], kind: str) -> Iterator[Disturbance]:
    """Clients send requests to both models while the block disturbs the model on host two.

    After the block the model's return is awaited. Every request must have ended as promised,
    and both models must have answered meanwhile.
    """
    touched = Disturbance(kind, ("there",), [], 0.0)
    with running(Load(server, cases, NUM_CLIENTS, deadline_s=READY_S, think_s=0.1)) as load:
        time.sleep(1.0)
        touched.start_s = time.monotonic()
        yield touched
        chaos = Chaos(server, MODELS)
        wait_until(lambda: chaos.is_whole(("here", "there")), READY_S, "whole again")
        touched.end_s = time.monotonic()
        time.sleep(1.0)
    assert judge(load.outcomes, [touched]) == []
    met = [o for o in load.outcomes if o.start_s < touched.start_s < o.end_s]
    assert any(o.model == "there" and o.kind == RIGHT for o in met)
    during = [o for o in load.outcomes if touched.start_s < o.start_s < touched.end_s]
    assert any(o.model == "here" and o.kind == RIGHT for o in during)


def ranks_of(server: HostsServer, model: str) -> list[Member]:
    return [m for m in server.find("rank") if model_of(m.group) == model]


def assert_nothing_is_left(server: HostsServer, lab: HostsLab, but: str = "") -> None:
    for name in lab.hosts:
        wait_until(lambda name=name: not lab.pids(name), 10.0, f"processes of {name} are gone")
        assert lab.shm_files(name) == []
        left = lab.temporary_files(name)
        assert not [path for path in left if not but or not path.startswith(but)]


def test_each_model_runs_on_a_host_of_its_own(server, lab):
    by_host = {
        name: {model_of(m.group) for m in server.on_host(name, "rank")} for name in lab.hosts
    }
    assert by_host == {"one": {"here"}, "two": {"there"}}
    assert server.end() == 0
    assert_nothing_is_left(server, lab)


def test_no_process_on_any_host_outlives_the_supervisor(server, lab):
    server.find("supervisor")[0].process.kill()
    for name in lab.hosts:
        wait_until(
            lambda name=name: not lab.pids(name), GONE_S, f"processes of {name} are gone"
        )


def test_no_process_stays_on_a_host_that_lost_the_supervisors_host(repository, tmp_path, lab):
    with HostsServer(repository, flags=FLAGS, folder=tmp_path, lab=lab):
        lab.power_off("one")
        wait_until(lambda: not lab.pids("two"), LOST_S, "processes of two are gone")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["rank", "daemon", "starter"])
def test_a_process_killed_on_another_host_costs_no_request(server, cases, lab, role):
    host = "one" if role == "starter" else "two"
    with disturbed(server, cases, f"kill a {role}"):
        victims = [
            m for m in server.on_host(host, role) if role != "starter" or "there" in m.group
        ]
        before = {m.pid for m in ranks_of(server, "there")}
        victims[-1].process.kill()
        wait_until(
            lambda: not before & {m.pid for m in ranks_of(server, "there")},
            NOTICED_S, "the rest of the group is ended",
        )  # fmt: skip
    assert server.end() == 0
    # A killed daemon of MPI leaves its own folder, which no process on its host deletes.
    assert_nothing_is_left(server, lab, but="prted." if role == "daemon" else "")


@pytest.mark.timeout(300)
def test_a_rank_stopped_on_another_host_is_noticed_and_replaced(server, cases, lab):
    with disturbed(server, cases, "stop a rank"):
        victim = server.on_host("two", "rank")[0]
        victim.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not server.is_model_ready("there"), NOTICED_S, "noticed")
        wait_until(lambda: not victim.process.is_running(), NOTICED_S, "ended")
    assert server.end() == 0
    assert_nothing_is_left(server, lab)


@pytest.mark.timeout(300)
def test_a_partition_stops_one_model_until_it_is_mended(server, cases, lab):
    with disturbed(server, cases, "partition"):
        lab.cut("two")
        wait_until(lambda: not server.is_model_ready("there"), NOTICED_S, "noticed")
        wait_until(lambda: not server.on_host("two", "rank"), 3 * NOTICED_S, "ranks end alone")
        lab.mend("two")
    assert server.end() == 0
    assert_nothing_is_left(server, lab)


@pytest.mark.timeout(300)
def test_a_returned_host_is_used_again(server, cases, lab):
    with disturbed(server, cases, "power off"):
        lab.power_off("two")
        wait_until(lambda: not server.is_model_ready("there"), NOTICED_S, "noticed")
        lab.power_on("two")
    assert server.end() == 0
    assert_nothing_is_left(server, lab)
