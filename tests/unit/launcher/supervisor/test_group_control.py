"""Worker groups that start and stop at the front end's request while the supervisor runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class ControlledSupervisor:
    """A supervisor whose front end sends requests that a test writes."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._num_requests = 0

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send one request; the supervisor's reply."""
        return self.reply(self.send(verb, **arguments))

    def send(self, verb: str, **arguments: Any) -> int:
        """Send one request; its number."""
        self._num_requests += 1
        line = json.dumps([self._num_requests, verb, arguments]) + "\n"
        draft = self._folder / "draft"
        draft.write_text(line)
        draft.rename(self._folder / "requests")
        return self._num_requests

    def reply(self, number: int) -> dict[str, Any]:
        """The reply to a request, after its arrival."""
        match = self.server.wait_for(rf'reply (.*"request_id": {number}[,}}].*)\n')
        reply: dict[str, Any] = json.loads(match[1])
        return reply

    def start(self, model: str, generation: int = 1) -> dict[str, Any]:
        """Ask for the groups of a model."""
        folder = self._folder / model
        (folder / "1").mkdir(parents=True, exist_ok=True)
        return self.ask("start_groups", model=model, folder=str(folder), generation=generation)

    def states(self, group: str) -> list[dict[str, Any]]:
        """All reports about a group to the front ends."""
        told = [
            json.loads(line.partition("state ")[2])
            for line in self.server.log.splitlines()
            if line.startswith("state {")
        ]
        return [each for each in told if each["group"] == group]


@pytest.fixture
def asked(
    supervise: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., ControlledSupervisor]:
    """Start a supervisor and wait until it serves."""

    def start(behaviour: str = "", **settings: Any) -> ControlledSupervisor:
        folder = tmp_path / "asked"
        folder.mkdir(exist_ok=True)
        monkeypatch.setenv("TEST_REQUESTS", str(folder / "requests"))
        server = supervise(behaviour, **settings)
        server.wait_ready()
        return ControlledSupervisor(server, folder)

    return start


def test_a_loaded_group_starts_and_reports_every_state(asked):
    server = asked()
    assert server.start("n") | {"request_id": 0} == {
        "request_id": 0, "error": "", "groups": ["n"], "conflicts": [],
    }  # fmt: skip
    server.server.wait_for("told up n")
    first, *_, last = server.states("n")
    assert (first["state"], last["state"]) == ("starting", "up")
    pid = server.server.pid_of(r"group n: started pid (\d+)")
    assert last | {"ranks": last["ranks"]} == {
        "group": "n", "model": "n", "generation": 1, "state": "up", "text": "",
        "fault_time": 0.0, "num_restarts": 0, "restart_in_s": 0.0, "world_size": 1,
        "start_method": "singleton",
        "ranks": [{"rank": 0, "pid": pid, "host": os.uname().nodename, "device": ""}],
    }  # fmt: skip
    assert server.server.terminate() == 0
    assert server.server.survivors() == []


def test_a_group_that_is_stopped_is_gone_when_the_reply_comes(asked):
    server = asked()
    server.start("n")
    server.server.wait_for("told up n")
    pid = server.server.pid_of(r"group n: started pid (\d+)")
    assert server.ask("stop_groups", groups=["n"])["error"] == ""
    assert not Path(f"/proc/{pid}").exists()
    assert "group m: ended" not in server.server.log
    assert server.server.terminate() == 0


def test_two_generations_of_a_model_run_side_by_side(asked):
    server = asked()
    server.start("n")
    assert server.start("n", generation=2)["groups"] == ["n@2"]
    server.server.wait_for("told up n@2")
    assert server.states("n@2")[-1]["generation"] == 2
    assert server.ask("stop_groups", groups=["n"])["error"] == ""
    assert server.server.log.count("group n@2: started") == 1
    assert server.server.terminate() == 0


def test_a_group_is_not_started_twice_under_one_name(asked):
    server = asked()
    server.start("n")
    error = server.start("n")["error"]
    assert error == "group 'n' runs already: stop it first, or start another generation"
    assert server.server.log.count("group n: started") == 1
    assert server.server.terminate() == 0


@pytest.mark.parametrize(
    ("model", "error", "conflicts"),
    [
        ("impossible", "its engine has no layers", []),
        ("crowded", "no room", ["m"]),
    ],
)
def test_a_group_that_cannot_start_is_refused_with_the_models_that_hold_its_devices(
    asked, model, error, conflicts
):
    server = asked()
    reply = server.start(model)
    assert (reply["error"], reply["conflicts"]) == (error, conflicts)
    assert reply["groups"] == []
    assert server.server.terminate() == 0


def test_memory_that_this_host_lacks_is_refused_before_a_rank_starts(asked):
    server = asked()
    reply = server.start("greedy")
    assert f"adds up to {1 << 60} bytes for all ranks of greedy, but" in reply["error"]
    assert server.states("greedy") == []
    assert server.server.terminate() == 0


def test_a_model_whose_folder_is_gone_is_refused(asked, tmp_path):
    server = asked()
    folder = str(tmp_path / "missing" / "n")
    reply = server.ask("start_groups", model="n", folder=folder, generation=1)
    assert f"{folder}" in reply["error"]
    assert server.server.terminate() == 0


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("act", ["fail-loading", "config-error", "die-loading"])
def test_a_failed_load_is_reported_and_removed_and_the_server_continues(asked, act):
    server = asked(f"rank:0:*:{act}:n")
    server.start("n")
    server.server.wait_for("told failed n")
    last = server.states("n")[-1]
    assert last["state"] == "failed" and last["fault_time"] > 0
    assert last["text"].startswith("rank 0 (pid ")
    assert server.start("n", generation=2)["groups"] == ["n@2"]
    server.server.wait_for("told up n@2")
    assert server.server.log.count("group n: started") == 1
    assert server.server.terminate() == 0


@pytest.mark.matrix(keep=0)
def test_a_load_whose_processes_cannot_be_started_ends_as_failed(asked):
    server = asked()
    assert server.start("unstartable")["groups"] == ["unstartable"]
    last = server.states("unstartable")[-1]
    assert last["state"] == "failed"
    assert last["text"] == "/nowhere/mpirun: No such file or directory"
    assert server.start("n")["groups"] == ["n"]
    assert server.server.terminate() == 0


@pytest.mark.matrix(keep=0)
@pytest.mark.parametrize("act", ["exit-early", "die-loading", "config-error"])
def test_loads_fail_with_their_orchestrator_and_the_server_continues(asked, act):
    server = asked(f"orchestrator:0:*:{act}")
    for model in ("spawned", "spawned-later"):
        assert server.start(model)["groups"] == [model]
        server.server.wait_for(f"told failed {model}\n")
        last = server.states(model)[-1]
        assert last["text"].startswith("its orchestrator did not start: orchestrator (pid ")
    assert server.server.log.count("orchestrator: started") == 2
    assert server.start("n")["groups"] == ["n"]
    server.server.wait_for("told up n\n")
    assert server.server.terminate() == 0
    assert server.server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_a_load_without_a_startable_orchestrator_fails_and_the_server_continues(asked):
    server = asked(orchestrator="/nowhere/orchestrator")
    assert server.start("spawned")["groups"] == ["spawned"]
    last = server.states("spawned")[-1]
    assert last["state"] == "failed"
    assert last["text"].endswith("/nowhere/orchestrator: No such file or directory")
    assert server.start("n")["groups"] == ["n"]
    server.server.wait_for("told up n\n")
    assert server.server.terminate() == 0


def test_a_loaded_group_that_dies_is_started_again(asked):
    server = asked(restart_delay_s=0.5)
    server.start("n")
    server.server.wait_for("told up n")
    os.kill(server.server.pid_of(r"group n: started pid (\d+)"), signal.SIGKILL)
    server.server.wait_for("told up n", count=2)
    down = [each for each in server.states("n") if each["state"] == "down"]
    assert down[0]["restart_in_s"] == 0
    assert down[-1]["restart_in_s"] == 0.5 and down[-1]["fault_time"] > 0
    assert down[-1]["text"].endswith("was killed by signal 9 (SIGKILL)")
    assert server.states("n")[-1]["num_restarts"] == 1
    assert server.server.terminate() == 0


@pytest.mark.matrix(keep=0)
def test_a_group_stopped_between_death_and_restart_is_not_started_again(asked):
    server = asked(restart_delay_s=1.0)
    server.start("n")
    server.server.wait_for("told up n")
    os.kill(server.server.pid_of(r"group n: started pid (\d+)"), signal.SIGKILL)
    server.server.wait_for("group n: .*; restart in 1.0 s")
    assert server.ask("stop_groups", groups=["n"])["error"] == ""
    # Restarts later than n would have been.
    os.kill(server.server.pid_of(r"group m: started pid (\d+)"), signal.SIGKILL)
    server.server.wait_for("group m: ready", count=2)
    assert server.server.log.count("group n: started") == 1
    assert server.server.terminate() == 0


def test_a_restarted_front_end_gets_its_loaded_models_and_only_their_groups(asked):
    server = asked()
    server.start("n")
    server.ask("save_state", groups=["m", "n"], state="m and n")
    server.start("unknown")
    for group in ("n", "unknown"):
        server.server.wait_for(f"told up {group}\n")
    os.kill(server.server.pid_of(r"front end: started pid (\d+)"), signal.SIGKILL)
    server.server.wait_for("saved state m and n")
    server.server.wait_for("group unknown: ended")
    server.server.wait_for("front end: ready", count=2)
    server.server.wait_for("told up (m|n)\n", count=4)
    assert server.server.log.count("group n: started") == 1
    assert server.server.terminate() == 0
    assert server.server.survivors() == []


@pytest.mark.matrix(keep=0)
def test_each_group_has_a_restart_budget_of_its_own(asked):
    server = asked("rank:0:0:die-ready", others=["a", "b", "c"], max_restarts=1)
    for name in ("m", "a", "b", "c"):
        server.server.wait_for(f"group {name}: ready", count=2)
    assert server.server.terminate() == 0


def test_a_group_with_an_exhausted_restart_budget_ends_the_server_with_code_1(supervise):
    server = supervise("rank:0:*:die-ready:a", others=["a"], max_restarts=1)
    assert server.end() == 1
    assert "not started again: 1 restarts within 600 s are used up" in server.log
    assert "told failed a" in server.log
    assert server.log.count("group m: started") == 1
    assert server.survivors() == []


def test_ending_a_group_leaves_the_processes_of_other_groups(asked):
    server = asked("rank:0:*:grandchild:n", others=["other"])
    server.start("n")
    server.server.wait_for("told up n")
    server.server.look()
    before = {pid for pid, each in server.server.seen.items() if each.is_running()}
    assert server.ask("stop_groups", groups=["n"])["error"] == ""
    gone = {pid for pid in before if not Path(f"/proc/{pid}").exists()}
    assert len(gone) >= 2
    for name in ("m", "other"):
        assert server.server.pid_of(rf"group {name}: started pid (\d+)") not in gone
    assert server.server.terminate() == 0
