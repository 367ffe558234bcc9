"""The first of several front ends, while another one, which is the test, is slow to follow."""

import contextlib
import os
import threading

import pytest
from controlled_frontend import ControlledFrontend, Engine
from slow_follower import SlowFollower, counts
from started_frontend import write_repository


def num_successes(frontend):
    """Requests that the server shows of the model."""
    start = 'nv_inference_request_success{model="postprocessing",version="1"} '
    lines = frontend.metrics().splitlines()
    return [float(x.removeprefix(start)) for x in lines if x.startswith(start)]


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


def test_unloads_and_settings_do_not_wait_for_loads_of_other_front_ends(frontend):
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


def test_counts_from_before_a_reload_at_a_slow_front_end_are_not_shown(frontend, tmp_path):
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


def test_a_group_in_use_by_another_front_end_may_reconnect(frontend):
    follower = frontend.follower
    follower.serve()
    assert frontend.load("tensorrt_llm")[0] == 200
    follower.may_serve.clear()
    assert frontend.unload("tensorrt_llm") == (200, None)
    frontend.wait_until(lambda: follower.was_asked_to_release == ["tensorrt_llm"])
    # For example after its death: requests of the other front end wait for the group.
    frontend.engines["tensorrt_llm"].close()
    again = Engine("tensorrt_llm", "tensorrt_llm", 1)
    assert again._is_accepted(frontend.engine_address, again._hello)
    again._peer.sock.close()
    assert frontend.stopped == []
    follower.serve()
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
