"""Loading and unloading token-level models: their worker groups come and go with them."""

import threading
import time

import pytest
from controlled_frontend import starting_over

from trimaran.comm.messages.messages import Command

NOT_READY = "Request for unknown model: '{}' version 1 is not at ready state"


@pytest.fixture
def start(tmp_path):
    """Starts successive front ends in explicit mode over one repository."""
    with starting_over(tmp_path) as start:
        yield start


@pytest.fixture
def frontend(start):
    """A server that has loaded the ensemble, and so its steps."""
    frontend = start()
    assert frontend.load("ensemble") == (200, None)
    return frontend


def change(frontend, model="tensorrt_llm"):
    """Change a model, so that its next load is a reload."""
    (frontend.repository / model / "1" / "changed").touch()
    path = frontend.repository / model / "config.pbtxt"
    path.write_text(path.read_text() + "\n")


def in_background(work, *args):
    """Run a call to the server in a thread; its result is in the list when that ends."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work(*args)))
    thread.start()
    return thread, results


def states(frontend):
    """The state of each model that was ever loaded."""
    return {name: state for name, (state, _) in frontend.index().items() if state}


def is_draining(frontend):
    """Whether a server has received the drain command."""
    try:
        return not frontend.is_ready()
    except ConnectionError:
        # A draining server closes idle connections.
        return True


def test_loading_an_ensemble_loads_its_missing_steps(frontend):
    assert states(frontend) == {
        "ensemble": "READY", "preprocessing": "READY", "postprocessing": "READY",
        "tensorrt_llm": "READY",
    }  # fmt: skip
    assert [group for group, _ in frontend.started] == ["tensorrt_llm"]
    assert frontend.generate()[0] == 200


def test_a_loading_model_is_unready_with_the_reason(start):
    frontend = start()
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: states(frontend).get("tensorrt_llm") == "LOADING")
    assert states(frontend)["ensemble"] == "LOADING"
    assert not frontend.is_ready()
    assert frontend.generate() == (503, {"error": NOT_READY.format("ensemble")})
    assert frontend.call("GET", "/v2/models/tensorrt_llm/ready") == (
        400, {"error": "Model version not ready"},
    )  # fmt: skip
    frontend.wait_until(lambda: frontend.started)
    frontend.release("tensorrt_llm")
    loading.join()
    assert results == [(200, None)]
    assert frontend.is_ready()


def test_a_failed_group_fails_the_load_with_its_error(start):
    frontend = start()
    frontend.failing["tensorrt_llm"] = "rank 0 (pid 7): out of memory"
    status, body = frontend.load("tensorrt_llm")
    assert status == 500
    assert body["error"].startswith("failed to load 'tensorrt_llm', its worker group ")
    assert "rank 0 (pid 7): out of memory" in body["error"]
    state, reason = frontend.index()["tensorrt_llm"]
    assert state == "UNAVAILABLE"
    assert "out of memory" in reason
    assert not frontend.is_ready()
    frontend.unload("tensorrt_llm")
    assert frontend.is_ready()
    assert frontend.load("tensorrt_llm")[0] == 200
    assert [group for group, _ in frontend.started] == ["tensorrt_llm", "tensorrt_llm@2"]


def test_a_failed_load_of_an_ensemble_names_the_step_and_the_reason(start):
    frontend = start()
    frontend.failing["tensorrt_llm"] = "rank 0 (pid 7): out of memory"
    assert frontend.load("ensemble")[0] == 500
    state, reason = frontend.index()["ensemble"]
    assert state == "UNAVAILABLE"
    assert reason.startswith("its step 'tensorrt_llm' was not loaded: its worker group ")
    assert "out of memory" in reason


def test_a_model_without_devices_is_refused_with_the_text_of_the_supervisor(start):
    frontend = start()
    frontend.refusals["tensorrt_llm"] = "gpu_device_ids names GPU 7 of 4"
    status, body = frontend.load("tensorrt_llm")
    assert (status, body["error"]) == (
        500, "failed to load 'tensorrt_llm', gpu_device_ids names GPU 7 of 4",
    )  # fmt: skip
    assert not frontend.started


def test_a_changed_model_replaces_the_running_version_without_a_failed_request(frontend):
    old = frontend.engines["tensorrt_llm"]
    whole = frontend.stream().text()
    old.gate.clear()
    running = frontend.stream()
    frontend.held.add("tensorrt_llm@2")
    change(frontend)
    loading, results = in_background(frontend.load, "tensorrt_llm")
    frontend.wait_until(lambda: len(frontend.started) == 2)
    assert states(frontend)["tensorrt_llm"] == "READY"
    assert frontend.is_ready()
    frontend.release("tensorrt_llm@2")
    loading.join()
    assert results == [(200, None)]
    assert frontend.generate()[0] == 200
    assert frontend.engines["tensorrt_llm@2"].num_submitted == 1
    assert old.num_submitted == 2
    assert not frontend.stopped
    old.gate.set()
    assert running.text() == whole
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    assert frontend.num_succeeded("tensorrt_llm") == 1


def test_a_failed_change_keeps_the_running_version(frontend):
    frontend.failing["tensorrt_llm@2"] = "rank 0 (pid 7): no such file"
    change(frontend)
    assert frontend.load("tensorrt_llm")[0] == 500
    assert states(frontend)["tensorrt_llm"] == "READY"
    assert frontend.generate()[0] == 200
    assert "tensorrt_llm" not in frontend.stopped


def test_without_free_devices_the_old_version_finishes_first(frontend):
    old = frontend.engines["tensorrt_llm"]
    whole = frontend.stream().text()
    old.gate.clear()
    running = frontend.stream()
    frontend.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    frontend.conflicts["tensorrt_llm@3"] = ["tensorrt_llm"]
    change(frontend)
    loading, results = in_background(frontend.load, "tensorrt_llm")
    frontend.wait_until(lambda: states(frontend)["tensorrt_llm"] == "LOADING")
    assert frontend.generate() == (503, {"error": NOT_READY.format("ensemble")})
    assert frontend.tokenize()[0] == 200
    assert not frontend.stopped
    old.gate.set()
    assert running.text() == whole
    loading.join()
    assert results == [(200, None)]
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    assert [group for group, _ in frontend.started] == ["tensorrt_llm", "tensorrt_llm@3"]
    assert frontend.generate()[0] == 200


@pytest.mark.parametrize("in_the_way", [[], ["tensorrt_llm@3"]])
def test_a_version_that_fails_on_reused_devices_is_replaced_by_the_old_version(
    frontend, in_the_way
):
    """This also holds while the failed groups are still ending."""
    frontend.stop_takes_s = 0.2
    frontend.conflicts["tensorrt_llm@4"] = frontend.conflicts["tensorrt_llm@5"] = in_the_way
    first = frontend.started[0][1]
    assert frontend.generate()[0] == 200
    frontend.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    frontend.failing["tensorrt_llm@3"] = "rank 0 (pid 7): no such file"
    path = frontend.repository / "tensorrt_llm" / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 8", "max_batch_size: 16"))
    status, body = frontend.load("tensorrt_llm")
    assert status == 500
    assert "no such file" in body["error"]
    assert states(frontend)["tensorrt_llm"] == "READY"
    (group, again) = frontend.started[-1]
    assert group in ("tensorrt_llm@4", "tensorrt_llm@5")
    assert again["config"] == first["config"]
    assert frontend.generate()[0] == 200
    assert frontend.num_succeeded("tensorrt_llm") == frontend.num_succeeded("ensemble") == 2
    assert frontend.is_ready()


def test_an_unload_waits_for_running_requests_and_ends_the_groups(frontend):
    engine = frontend.engines["tensorrt_llm"]
    whole = frontend.stream().text()
    engine.gate.clear()
    running = frontend.stream()
    assert frontend.unload("tensorrt_llm") == (200, None)
    assert states(frontend)["tensorrt_llm"] == "UNLOADING"
    assert states(frontend)["ensemble"] == "UNLOADING"
    assert states(frontend)["preprocessing"] == "READY"
    assert not frontend.is_ready()
    assert frontend.generate()[0] == 503
    assert not frontend.stopped
    engine.gate.set()
    assert running.text() == whole
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    frontend.wait_until(lambda: frontend.index()["ensemble"] == ("UNAVAILABLE", "unloaded"))
    frontend.wait_until(frontend.is_ready)
    frontend.wait_until(lambda: 'model="tensorrt_llm"' not in frontend.metrics())


def test_an_ensemble_returns_with_its_step_unless_unloaded_explicitly(frontend):
    assert frontend.load("tensorrt_llm_bls") == (200, None)
    frontend.unload("tensorrt_llm_bls")
    frontend.unload("tensorrt_llm")
    frontend.wait_until(lambda: frontend.index()["ensemble"] == ("UNAVAILABLE", "unloaded"))
    assert frontend.load("tensorrt_llm")[0] == 200
    assert states(frontend)["ensemble"] == "READY"
    assert states(frontend)["tensorrt_llm_bls"] == "UNAVAILABLE"
    assert frontend.generate()[0] == 200


def test_unload_dependents_unloads_the_steps(frontend):
    assert frontend.unload("ensemble")[0] == 200
    assert states(frontend)["tensorrt_llm"] == "READY"
    assert frontend.load("ensemble")[0] == 200
    assert frontend.unload("ensemble", unload_dependents=True)[0] == 200
    frontend.wait_until(lambda: set(states(frontend).values()) == {"UNAVAILABLE"})
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])


def test_unload_dependents_unloads_the_steps_of_an_ensemble_that_waits_for_a_step(frontend):
    assert frontend.unload("preprocessing")[0] == 200
    frontend.wait_until(lambda: frontend.index()["ensemble"] == ("UNAVAILABLE", "unloaded"))
    assert frontend.unload("ensemble", unload_dependents=True)[0] == 200
    frontend.wait_until(lambda: set(states(frontend).values()) == {"UNAVAILABLE"})
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])


def test_unload_dependents_unloads_the_steps_of_an_ensemble_in_loading(start):
    frontend = start(load_models=("postprocessing",))
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: frontend.started)
    assert frontend.unload("ensemble", unload_dependents=True)[0] == 200
    loading.join()
    assert "unloaded while it was being loaded" in results[0][1]["error"]
    frontend.wait_until(lambda: {r for _, r in frontend.index().values() if r} == {"unloaded"})
    # The cancelled load of the step stops the step's workers when that load ends.
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    assert frontend.is_ready()


def test_an_unload_cancels_the_load_of_an_ensemble_that_waits_for_a_step(start):
    frontend = start()
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: frontend.started)
    assert frontend.unload("ensemble")[0] == 200
    frontend.release("tensorrt_llm")
    loading.join()
    assert results[0][0] == 500
    assert "unloaded while it was being loaded" in results[0][1]["error"]
    assert states(frontend)["tensorrt_llm"] == "READY"
    frontend.wait_until(lambda: frontend.index()["ensemble"] == ("UNAVAILABLE", "unloaded"))


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "behind their end"])
def test_a_load_right_after_an_unload_needs_no_pause(frontend, is_late):
    """At any moment of the refusal for the devices of the unloaded model's groups."""
    frontend.refuses_late = is_late
    whole = frontend.stream().text()
    frontend.engines["tensorrt_llm"].gate.clear()
    running = frontend.stream()
    frontend.conflicts["tensorrt_llm@2"] = ["tensorrt_llm"]
    frontend.unload("tensorrt_llm")
    loading, results = in_background(frontend.load, "tensorrt_llm")
    frontend.wait_until(lambda: states(frontend)["tensorrt_llm"] == "LOADING")
    frontend.engines["tensorrt_llm"].gate.set()
    assert running.text() == whole
    loading.join()
    assert results == [(200, None)]
    assert frontend.generate()[0] == 200


def test_a_load_during_requests_of_the_unloaded_model_resets_all_counters(frontend):
    frontend.generate()
    frontend.engines["tensorrt_llm"].gate.clear()
    running = frontend.stream()
    frontend.unload("ensemble")
    assert frontend.load("ensemble") == (200, None)
    frontend.engines["tensorrt_llm"].gate.set()
    running.text()
    assert frontend.generate()[0] == 200
    assert frontend.num_succeeded("ensemble") == 1
    shown = 'nv_inference_request_success{model="ensemble",version="1"} 1\n'
    assert shown in frontend.metrics()


def test_a_load_continues_after_a_disconnect_of_its_client(start):
    frontend = start()
    frontend.held.add("tensorrt_llm")
    connection = frontend.connect()
    connection.request("POST", "/v2/repository/models/tensorrt_llm/load")
    frontend.wait_until(lambda: frontend.started)
    connection.close()
    frontend.release("tensorrt_llm")
    frontend.wait_until(lambda: states(frontend)["tensorrt_llm"] == "READY")


def test_a_step_unloaded_during_the_load_of_its_ensemble_is_named(start):
    frontend = start(load_models=("postprocessing",))
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: frontend.started)
    assert frontend.unload("postprocessing")[0] == 200
    frontend.release("tensorrt_llm")
    loading.join()
    ((status, answer),) = results
    assert status == 500
    assert "its step 'postprocessing' is not loaded. Load that model" in answer["error"]
    assert frontend.load("ensemble")[0] == 200


def test_a_restarted_front_end_serves_the_loaded_models(start):
    frontend = start()
    assert frontend.load("ensemble")[0] == 200
    change(frontend)
    assert frontend.load("tensorrt_llm")[0] == 200
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    frontend.wait_until(lambda: frontend.saved["groups"] == ["tensorrt_llm@2"])
    saved_state = frontend.saved["state"]
    frontend.process.kill()
    frontend.process.wait()
    after = start(saved_state=saved_state, started=["tensorrt_llm@2"])
    assert after.generate()[0] == 200
    assert after.load("tensorrt_llm")[0] == 200
    assert not after.started
    change(after)
    assert after.load("tensorrt_llm")[0] == 200
    assert [group for group, _ in after.started] == ["tensorrt_llm@3"]


def test_a_drain_cancels_a_load_in_progress(start):
    frontend = start()
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "tensorrt_llm")
    frontend.wait_until(lambda: frontend.started)
    frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
    loading.join()
    assert results[0][0] == 503
    assert results[0][1]["error"].startswith("Server is stopping")
    frontend.wait_until(lambda: frontend.states[-1].state == "drained")
    assert frontend.load("tensorrt_llm")[0] == 503
    frontend.supervisor.send(Command(verb="shutdown"))
    assert frontend.process.wait(60) == 0


def test_a_group_in_start_ends_with_its_cancelled_load(start):
    frontend = start()
    assert frontend.load("preprocessing")[0] == 200
    frontend.held.add("tensorrt_llm")
    frontend.may_answer.clear()
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: frontend.started)

    assert frontend.unload("tensorrt_llm")[0] == 200
    frontend.may_answer.set()

    loading.join()
    assert "unloaded while it was being loaded" in results[0][1]["error"]
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    assert frontend.load("ensemble")[0] == 200
    assert frontend.generate()[0] == 200


def test_an_unload_cancels_a_load_in_progress(start):
    frontend = start()
    assert frontend.load("preprocessing")[0] == 200
    frontend.held.add("tensorrt_llm")
    loading, results = in_background(frontend.load, "ensemble")
    frontend.wait_until(lambda: frontend.started)
    assert frontend.unload("tensorrt_llm")[0] == 200
    loading.join()
    assert results[0][0] == 500
    assert "unloaded while it was being loaded" in results[0][1]["error"]
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    frontend.wait_until(lambda: states(frontend)["tensorrt_llm"] == "UNAVAILABLE")
    assert states(frontend)["postprocessing"] == "READY"
    assert frontend.load("ensemble")[0] == 200
    assert frontend.generate()[0] == 200


def test_an_unload_cancels_loads_that_wait_for_a_load_in_progress(start):
    frontend = start()
    frontend.held.add("tensorrt_llm")
    loads = [in_background(frontend.load, "tensorrt_llm") for _ in range(2)]
    frontend.wait_until(lambda: frontend.started)
    time.sleep(0.2)
    assert frontend.unload("tensorrt_llm")[0] == 200
    for loading, results in loads:
        loading.join()
        assert "unloaded while it was being loaded" in results[0][1]["error"]
    assert [group for group, _ in frontend.started] == ["tensorrt_llm"]
    assert frontend.load("tensorrt_llm")[0] == 200


def test_polling_replaces_engines_that_were_started_with_the_server(start):
    frontend = start(
        model_control_mode="poll",
        repository_poll_s=0.2,
        groups={"tensorrt_llm": ("tensorrt_llm",)},
        started=["tensorrt_llm"],
    )
    assert frontend.generate()[0] == 200
    assert not frontend.started
    change(frontend)
    frontend.wait_until(lambda: frontend.stopped == ["tensorrt_llm"])
    assert [group for group, _ in frontend.started] == ["tensorrt_llm@2"]
    assert frontend.generate()[0] == 200


def test_a_drain_cancels_loads_of_polling_and_finishes_requests(start):
    frontend = start(
        model_control_mode="poll",
        repository_poll_s=0.2,
        groups={"tensorrt_llm": ("tensorrt_llm",)},
        started=["tensorrt_llm"],
    )
    whole = frontend.stream().text()
    frontend.engines["tensorrt_llm"].gate.clear()
    running = frontend.stream()
    frontend.held.add("tensorrt_llm@2")
    change(frontend)
    frontend.wait_until(lambda: frontend.started)
    frontend.supervisor.send(Command(verb="drain", arguments={"timeout_s": 30}))
    frontend.wait_until(lambda: is_draining(frontend))
    frontend.engines["tensorrt_llm"].gate.set()
    assert running.text() == whole
    frontend.wait_until(lambda: frontend.states[-1].state == "drained")
    frontend.supervisor.send(Command(verb="shutdown"))
    assert frontend.process.wait(60) == 0


def test_a_group_within_a_shared_mpi_job_is_not_unloaded(start):
    frontend = start()
    frontend.start_method = "prestarted"
    assert frontend.load("ensemble")[0] == 200
    status, body = frontend.unload("tensorrt_llm")
    assert status == 501
    assert "part of an MPI job that ends as a whole" in body["error"]
    assert frontend.unload("ensemble", unload_dependents=True)[0] == 501
    assert frontend.unload("ensemble") == (200, None)
    frontend.wait_until(lambda: states(frontend)["ensemble"] == "UNAVAILABLE")
    assert states(frontend)["tensorrt_llm"] == "READY"
    assert frontend.load("ensemble")[0] == 200
    assert frontend.generate()[0] == 200
