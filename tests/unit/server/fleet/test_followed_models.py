"""A front end that follows the first one, which is the test."""

import contextlib
import http.client
import os
import select
import time

import pytest
from started_frontend import Peer as Connection
from started_frontend import StartedFrontend, write_repository

from trimaran.comm.messages.messages import Answer, Ask, Command
from trimaran.comm.transport.sockets import Address
from trimaran.server.fleet.peer_link import SharedState
from trimaran.server.loading.group_requests import SavedModel, SavedState
from trimaran.server.repository.config_pbtxt import read_config

DEADLINE_S = 60
SLOW_CONFIG = """
name: "slow"
backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SLOW_CODE = """
import os, time

class TritonPythonModel:
    def initialize(self, args):
        open({begun!r}, "w").close()
        while not os.path.exists({go!r}):
            time.sleep(0.01)

    def execute(self, requests):
        raise NotImplementedError
"""
FAILING_CODE = """
class TritonPythonModel:
    def initialize(self, args):
        open({go!r})

    def execute(self, requests):
        raise NotImplementedError
"""


class Follower(StartedFrontend):
    """The second front end of a server."""

    def __init__(self, stack, tmp_path):
        self._address = Address.parse(f"unix:{tmp_path}/frontends.sock")
        self._listener = stack.enter_context(self._address.listen())
        self._listener.settimeout(DEADLINE_S)
        self._stack = stack
        super().__init__(
            stack, tmp_path, index=1, num_frontends=2, first_frontend=str(self._address),
            groups={},
        )  # fmt: skip

    def joined(self):
        """The follower's next connection to the first front end, after the join."""
        first = Connection(self._stack.enter_context(self._listener.accept()[0]))
        ask = first.receive(Ask)
        assert ask.verb == "join"
        first.send(Answer(ask_id=ask.ask_id))
        return first

    def status(self, path):
        """The status of a GET."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port(), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().status

    def serve(self, first, *models, ask_id=1):
        """Let the follower serve these models; returns the error, if any."""
        wire = SharedState(saved_state=SavedState(models=models).to_bytes()).to_wire()
        first.send(Ask(ask_id=ask_id, verb="state", arguments=wire))
        return lambda: first.receive(Answer).error

    def answers_to(self, first, ask_id, verb, **arguments):
        """The numbers of the answered questions, up to this number."""
        first.send(Ask(ask_id=ask_id, verb=verb, arguments=arguments))
        found = []
        while ask_id not in found:
            answer = first.receive(Answer)
            assert answer.error == ""
            found.append(answer.ask_id)
        return found


def saved_model(repository, name, groups=()):
    folder = repository / name
    config = read_config(folder / "config.pbtxt").SerializeToString(deterministic=True)
    return SavedModel(name=name, folder=str(folder), config=config, groups=groups)


def write_python_model(repository, tmp_path, code):
    folder = repository / "slow" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(SLOW_CONFIG)
    paths = {name: str(tmp_path / name) for name in ("begun", "go")}
    (folder / "model.py").write_text(code.format(**paths))


def wait_for_file(path):
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_a_load_started_before_the_death_of_the_first_front_end_continues_for_its_successor(
    stack, tmp_path
):
    repository = tmp_path / "repository"
    write_repository(repository)
    write_python_model(repository, tmp_path, SLOW_CODE)
    models = (
        saved_model(repository, "tensorrt_llm", ("g0",)),
        saved_model(repository, "slow"),
    )
    follower = Follower(stack, tmp_path)
    first = follower.joined()
    follower.serve(first, *models)
    follower.dial_in(stack)
    wait_for_file(tmp_path / "begun")
    # One model is ready, and the other model is in preparation.
    time.sleep(0.2)
    first.close()
    os.unlink(tmp_path / "begun")
    answer = follower.serve(follower.joined(), *models)
    (tmp_path / "go").touch()
    assert answer() == ""
    follower.supervisor.wait_for_state("ready")
    assert not (tmp_path / "begun").exists()


def test_a_slow_model_delays_no_other_model(stack, tmp_path):
    repository = tmp_path / "repository"
    write_repository(repository)
    write_python_model(repository, tmp_path, SLOW_CODE)
    pre, post, slow = (
        saved_model(repository, name) for name in ("preprocessing", "postprocessing", "slow")
    )
    follower = Follower(stack, tmp_path)
    first = follower.joined()
    assert follower.serve(first, post)() == ""
    follower.supervisor.wait_for_state("ready")

    follower.serve(first, post, slow, ask_id=2)
    wait_for_file(tmp_path / "begun")
    follower.serve(first, pre, slow, ask_id=3)
    assert 3 not in follower.answers_to(first, 4, "serves", name="preprocessing")
    assert follower.status("/v2/models/preprocessing/ready") == 200
    assert follower.status("/v2/models/postprocessing/ready") == 404

    (tmp_path / "go").touch()
    follower.answers_to(first, 5, "serves", name="slow")
    assert follower.status("/v2/models/slow/ready") == 200


def test_a_load_that_is_no_longer_wanted_is_not_awaited(stack, tmp_path):
    repository = tmp_path / "repository"
    write_repository(repository)
    write_python_model(repository, tmp_path, SLOW_CODE)
    post, slow = (saved_model(repository, name) for name in ("postprocessing", "slow"))
    follower = Follower(stack, tmp_path)
    first = follower.joined()
    follower.serve(first, slow)
    wait_for_file(tmp_path / "begun")
    os.unlink(tmp_path / "begun")
    follower.serve(first, post, ask_id=2)
    follower.answers_to(first, 3, "serves", name="slow")
    follower.supervisor.wait_for_state("ready")
    assert follower.status("/v2/models/slow") == 404

    follower.serve(first, post, slow, ask_id=4)
    wait_for_file(tmp_path / "begun")
    (tmp_path / "go").touch()
    follower.answers_to(first, 5, "serves", name="slow")
    assert follower.status("/v2/models/slow/ready") == 200


def test_a_model_version_releases_its_groups_for_the_next_version(stack, tmp_path):
    repository = tmp_path / "repository"
    write_repository(repository)
    follower = Follower(stack, tmp_path)
    first = follower.joined()
    answer = follower.serve(first, saved_model(repository, "tensorrt_llm", ("g0",)))
    follower.dial_in(stack)
    assert answer() == ""
    follower.supervisor.wait_for_state("ready")
    assert follower.serve(first, saved_model(repository, "tensorrt_llm"))() == ""
    first.send(Ask(ask_id=2, verb="release", arguments={"groups": ["g0"]}))
    first.sock.settimeout(5)
    assert first.receive(Answer).ask_id == 2


def test_a_model_that_fails_at_a_follower_is_reported_and_retried(stack, tmp_path):
    repository = tmp_path / "repository"
    write_python_model(repository, tmp_path, FAILING_CODE)
    follower = Follower(stack, tmp_path)
    answer = follower.serve(follower.joined(), saved_model(repository, "slow"))
    follower.wait_until_listening()
    assert answer() == ""
    follower.supervisor.wait_for_state("ready")
    assert follower.status("/v2/health/ready") == 400
    assert follower.status("/v2/models/slow/config") == 503
    (tmp_path / "go").touch()
    deadline = time.monotonic() + DEADLINE_S
    while follower.status("/v2/models/slow/ready") != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert follower.status("/v2/health/ready") == 200


def test_a_load_ends_after_the_new_group_has_connected_to_every_front_end(stack, tmp_path):
    repository = tmp_path / "repository"
    write_repository(repository)
    follower = Follower(stack, tmp_path)
    state = {"group": "g0", "model": "tensorrt_llm", "generation": 1, "state": "starting"}
    follower.supervisor.send(Command(verb="group_state", arguments=state))
    first = follower.joined()
    answer = follower.serve(first, saved_model(repository, "tensorrt_llm", ("g0",)))
    assert not select.select([first.sock], [], [], 1)[0]
    follower.dial_in(stack)
    assert answer() == ""
    follower.supervisor.wait_for_state("ready")
    assert follower.status("/v2/models/tensorrt_llm/ready") == 200
