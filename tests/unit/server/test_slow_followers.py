"""The first of several front ends, while another one, which is the test, is slow to follow."""

import contextlib
import os
import threading

import pytest
from controlled_frontend import DEADLINE_S, ControlledFrontend, Engine
from started_frontend import Peer, write_repository
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.address import Address
from trimaran.comm.messages import Answer, Ask
from trimaran.server.metrics import Metrics


class Counted:
    """A model of the slow front end, as far as its requests are counted."""

    name, version, is_ready, is_decoupled = "postprocessing", "1", True, False
    config = ModelConfig(name=name)


def counts(num_requests):
    """What a front end tells that answered so many requests."""
    metrics = Metrics()
    model = metrics.measure(Counted())
    for _ in range(num_requests):
        model._metrics.success(batch_size=1, total_us=3, queue_us=1, infer_us=1)
    return metrics.own_counts([model.statistics.message()], 0)


def num_successes(frontend):
    """Requests that the server shows of the model."""
    start = 'nv_inference_request_success{model="postprocessing",version="1"} '
    lines = frontend.metrics().splitlines()
    return [float(x.removeprefix(start)) for x in lines if x.startswith(start)]


class SlowFollower:
    """Hears of every state at once, and serves none of them before it is told to."""

    def __init__(self, stack, address):
        self._peer = Peer(stack.enter_context(Address.parse(address).connect(DEADLINE_S)))
        who = {"token": "secret", "index": 1, "legacy": {}}
        self._peer.send(Ask(ask_id=1, verb="join", arguments=who))
        self.was_asked_for = []
        self.was_asked_to_release = []
        self.may_serve = threading.Event()
        self.counts = counts(3)
        self._waiting = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self):
        """Leave."""
        self.may_serve.set()
        with contextlib.suppress(OSError):
            self._peer.close()
        self._thread.join()

    def serve(self):
        """Be done with everything."""
        self.may_serve.set()
        for ask_id in self._waiting:
            self._peer.send(Answer(ask_id=ask_id))

    def _follow(self):
        while (message := self._peer.receive(Ask, Answer)) is not None:
            if isinstance(message, Answer):
                continue
            if message.verb == "serves":
                self.was_asked_for.append(message.arguments["name"])
            if message.verb == "release":
                self.was_asked_to_release += message.arguments["groups"]
            values = self.counts if message.verb == "counts" else {}
            if message.verb in ("heard", "counts") or self.may_serve.is_set():
                self._peer.send(Answer(ask_id=message.ask_id, values=values))
            else:
                self._waiting.append(message.ask_id)


@pytest.fixture
def frontend(tmp_path):
    """A first front end in explicit mode, with a slow follower."""
    write_repository(tmp_path / "repository")
    address = f"unix:{tmp_path}/frontends.sock"
    with contextlib.ExitStack() as stack:
        frontend = ControlledFrontend(
            stack, tmp_path, num_frontends=2, first_frontend=address,
            load_models=("postprocessing",),
        )  # fmt: skip
        frontend.wait_ready()
        frontend.follower = SlowFollower(stack, address)
        stack.callback(frontend.follower.close)
        frontend.wait_until(lambda: "Front end 1 has joined" in frontend.text())
        yield frontend


def test_unloads_and_settings_do_not_wait_for_what_another_front_end_starts(frontend):
    assert frontend.unload("postprocessing") == (200, None)
    status, settings = frontend.call("POST", "/v2/logging", {"log_verbose_level": 1})
    assert (status, settings["log_verbose_level"]) == (200, 1)
    assert "does not follow" not in frontend.text()


def test_a_load_ends_once_every_front_end_serves_the_model(frontend):
    answers = []
    load = threading.Thread(target=lambda: answers.append(frontend.load("preprocessing")))
    load.start()
    frontend.wait_until(lambda: frontend.follower.was_asked_for)
    assert frontend.follower.was_asked_for == ["preprocessing"]
    assert answers == []
    frontend.follower.serve()
    load.join()
    assert answers == [(200, None)]
    assert "does not serve" not in frontend.text()


def test_what_a_slow_front_end_counted_of_a_model_before_its_load_is_not_shown_after_it(
    frontend, tmp_path
):
    assert num_successes(frontend) == [3]
    os.utime(tmp_path / "repository" / "postprocessing" / "config.pbtxt")
    load = threading.Thread(target=frontend.load, args=("postprocessing",))
    load.start()
    frontend.wait_until(lambda: frontend.follower.was_asked_for)
    assert num_successes(frontend) == [0]
    frontend.follower.counts = counts(1)
    frontend.follower.serve()
    load.join()
    assert num_successes(frontend) == [1]


def test_a_group_that_another_front_end_still_uses_may_dial_in_again(frontend):
    follower = frontend.follower
    follower.serve()
    assert frontend.load("tensorrt_llm")[0] == 200
    follower.may_serve.clear()
    assert frontend.unload("tensorrt_llm") == (200, None)
    frontend.wait_until(lambda: follower.was_asked_to_release == ["tensorrt_llm"])
    # It died, say: the requests of the other front end wait for it.
    frontend.engines["tensorrt_llm"].close()
    again = Engine("tensorrt_llm", "tensorrt_llm", 1)
    assert again._is_accepted(frontend.engine_address, again._hello)
    again._peer.sock.close()
    assert frontend.stopped == []
    follower.serve()
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
