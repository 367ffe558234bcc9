"""Groups on which other front ends finish requests while the first front end dies."""

import contextlib
import threading

import pytest
from controlled_frontend import ControlledFrontend, Engine
from slow_follower import SlowFollower
from started_frontend import write_repository


class Successions:
    """Successive first front ends beside a follower that outlives them."""

    def __init__(self, stack, tmp_path):
        self.repository = tmp_path / "repository"
        write_repository(self.repository)
        self._stack, self._tmp_path = stack, tmp_path
        self._address = f"unix:{tmp_path}/frontends.sock"
        self.first = self._start()
        self.follow()
        self.follower.serve()

    def follow(self):
        """Let the follower join."""
        self.follower = SlowFollower(self._stack, self._address)
        self._stack.callback(self.follower.close)
        self.first.wait_until(lambda: "Front end 1 has joined" in self.first.text())

    def succeed(self, other="up", **config):
        """Kill the first front end after its state was saved, and start a successor. The
        supervisor reports ``other`` as the follower's state to the successor."""
        self.first.process.kill()
        self.first.process.wait()
        engines, saved = self.first.engines, self.first.saved
        self.first = self._start(saved_state=saved["state"], **config)
        self.first.engines.update(engines)
        self.first._report("front end 1", "", 1, other)
        return saved["groups"]

    def _start(self, **config):
        first = ControlledFrontend(
            self._stack, self._tmp_path, num_frontends=2, first_frontend=self._address, **config
        )
        first.wait_ready()
        return first

    def wait_until_saved(self, *groups):
        """Wait until the supervisor is to keep these groups."""
        self.first.wait_until(lambda: self.first.saved.get("groups") == list(groups))


@pytest.fixture
def server(tmp_path):
    """A first front end in explicit mode that has loaded the ensemble, and another one."""
    with contextlib.ExitStack() as stack:
        server = Successions(stack, tmp_path)
        assert server.first.load("ensemble")[0] == 200
        yield server


def unload(server):
    """Unload the model while the follower has requests of the model."""
    server.follower.may_serve.clear()
    assert server.first.unload("tensorrt_llm") == (200, None)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)


def begin_load(server):
    """Load a changed model, until the first front end dies."""
    (server.repository / "tensorrt_llm" / "1" / "changed").touch()
    path = server.repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text() + "\n")
    server.follower.may_serve.clear()
    first = server.first

    def load():
        with contextlib.suppress(OSError):
            first.load("tensorrt_llm")

    thread = threading.Thread(target=load)
    thread.start()
    return thread


def is_accepted(server, group):
    """Whether a group that was started again may dial in."""
    engine = Engine("tensorrt_llm", group, 1)
    answer = engine._is_accepted(server.first.engine_address, engine._hello)
    engine._peer.sock.close()
    return answer


def test_a_successor_ends_groups_after_every_front_end_has_released_them(server):
    unload(server)
    assert server.first.stopped == []
    assert server.succeed() == ["tensorrt_llm"]

    server.follow()
    server.first.wait_until(lambda: server.follower.was_asked_to_release == ["tensorrt_llm"])
    assert is_accepted(server, "tensorrt_llm")
    assert server.first.stopped == []
    assert server.first.index()["postprocessing"][0] == "READY"
    assert "tensorrt_llm" not in {n for n, s in server.first.index().items() if s[0] == "READY"}

    server.follower.serve()
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm"])
    server.wait_until_saved()


@pytest.mark.matrix(keep=0)
def test_a_successor_does_not_wait_for_a_dead_front_end(server):
    unload(server)
    server.succeed(other="down")
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm"])


@pytest.mark.matrix(keep=0)
def test_replaced_groups_end_after_every_front_end_has_released_them(server):
    load = begin_load(server)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    server.wait_until_saved("tensorrt_llm@2", "tensorrt_llm")
    server.succeed(started=["tensorrt_llm@2"])
    load.join()

    server.follow()
    server.first.wait_until(lambda: server.follower.was_asked_to_release == ["tensorrt_llm"])
    assert server.first.generate()[0] == 200
    assert server.first.stopped == []
    server.follower.serve()
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm"])
    server.wait_until_saved("tensorrt_llm@2")


@pytest.mark.matrix(keep=0)
def test_groups_ended_at_a_successor_keep_models_that_are_not_restored_yet(server, tmp_path):
    load = begin_load(server)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    server.wait_until_saved("tensorrt_llm@2", "tensorrt_llm")
    server.first.process.kill()
    server.first.process.wait()
    load.join()

    with contextlib.ExitStack() as stack:
        state = server.first.saved["state"]
        successor = ControlledFrontend(stack, tmp_path, saved_state=state)
        timer = threading.Timer(0.5, successor._start_engine_if_needed, ["tensorrt_llm@2"])
        timer.start()
        successor.wait_until(lambda: successor.saved)
        assert "tensorrt_llm@2" in successor.saved["groups"]
        successor.wait_until(lambda: successor.stopped == ["tensorrt_llm"])
        timer.join()


@pytest.mark.matrix(keep=0)
def test_a_model_that_freed_its_devices_for_a_failed_load_returns_at_a_successor(server):
    server.first.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    load = begin_load(server)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    server.wait_until_saved("tensorrt_llm")
    conflicts = {f"tensorrt_llm@{number}": ["tensorrt_llm"] for number in (3, 4)}
    server.succeed(conflicts=conflicts)
    load.join()

    server.follow()
    server.first.wait_until(lambda: server.follower.was_asked_to_release == ["tensorrt_llm"])
    states = {name: state for name, (state, _) in server.first.index().items()}
    assert states["tensorrt_llm"] == states["ensemble"] == "LOADING"
    assert server.first.generate()[0] == 503
    assert server.first.tokenize()[0] == 200
    assert server.first.stopped == []
    server.follower.serve()
    server.first.wait_until(lambda: server.first.generate()[0] == 200)
    assert server.first.stopped == ["tensorrt_llm"]
    server.wait_until_saved(server.first.started[-1][0])


def test_a_polling_successor_loads_an_interrupted_change(server):
    server.first.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    load = begin_load(server)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    server.wait_until_saved("tensorrt_llm")
    polls = {"model_control_mode": "poll", "repository_poll_s": 0.1}
    server.succeed(conflicts={"tensorrt_llm@3": ["tensorrt_llm"]}, **polls)
    load.join()

    server.follow()
    server.follower.serve()
    # The earlier model is restored first.
    server.first.wait_until(lambda: len(server.first.started) == 2)
    server.first.wait_until(lambda: server.first.generate()[0] == 200)


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm"])
def test_unloading_returning_models_makes_the_server_ready(server, name):
    server.first.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    load = begin_load(server)
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    server.wait_until_saved("tensorrt_llm")
    server.succeed(conflicts={"tensorrt_llm@3": ["tensorrt_llm"]})
    load.join()

    server.follow()
    assert server.first.index()["ensemble"][0] == "LOADING"
    assert server.first.unload(name) == (200, None)
    server.follower.serve()
    server.first.wait_until(lambda: server.first.index()["ensemble"][0] != "LOADING")
    server.first.wait_until(lambda: server.first.index()["tensorrt_llm"][0] != "LOADING")
    assert server.first.index()["ensemble"] == ("UNAVAILABLE", "unloaded")
    assert server.first.is_ready()


@pytest.mark.matrix(keep=0)
def test_files_of_released_groups_are_deleted_also_at_a_successor(server):
    server.follower.serve()
    folder = server.repository / "tensorrt_llm"
    assert server.first.load_with_file(folder) == (200, None)
    (note,) = server.first.files("note")
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm"])
    server.wait_until_saved("tensorrt_llm@2")
    unload(server)
    assert server.succeed() == ["tensorrt_llm@2"]

    server.follow()
    server.first.wait_until(lambda: server.follower.was_asked_to_release)
    assert note.exists()
    server.follower.serve()
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm@2"])
    server.first.wait_until(lambda: not note.exists())


@pytest.mark.matrix(keep=0)
def test_files_of_an_interrupted_load_are_deleted_and_those_of_loaded_models_kept(server):
    server.follower.serve()
    assert server.first.load_with_file(server.repository / "postprocessing") == (200, None)
    (kept,) = server.first.files("note")
    first = server.first
    first.held.add("tensorrt_llm@2")

    def load():
        with contextlib.suppress(OSError):
            first.load_with_file(server.repository / "tensorrt_llm")

    thread = threading.Thread(target=load)
    thread.start()
    first.wait_until(lambda: len(first.started) == 2)
    assert len(first.files("note")) == 2
    server.succeed(started=["tensorrt_llm"])
    thread.join()
    server.first.wait_until(lambda: server.first.files("note") == [kept])


@pytest.mark.matrix(keep=0)
def test_groups_of_an_unreadable_model_end_after_every_front_end_has_released_them(server):
    (server.repository / "tensorrt_llm" / "1").rename(server.repository / "elsewhere")
    server.follower.may_serve.clear()
    server.wait_until_saved("tensorrt_llm")
    server.succeed()

    assert "Model 'tensorrt_llm' is not served any more" in server.first.text()
    state, reason = server.first.index()["tensorrt_llm"]
    assert state == "UNAVAILABLE"
    assert "holds no version folder" in reason
    assert not server.first.is_ready()
    server.follow()
    server.first.wait_until(lambda: server.follower.was_asked_to_release == ["tensorrt_llm"])
    assert server.first.tokenize()[0] == 200
    assert server.first.stopped == []
    server.follower.serve()
    server.first.wait_until(lambda: server.first.stopped == ["tensorrt_llm"])
