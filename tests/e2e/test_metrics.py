"""Metrics for operators: live and correct values, and a quiet idle system."""

from __future__ import annotations

import contextlib
import time

import psutil
from served import Served
from waiting import wait_until

STEPS = ("ensemble", "preprocessing", "tensorrt_llm", "postprocessing")


def settled(server: Served, name: str, expected: float, **labels: str) -> float:
    """The metric's value once it meets the condition."""
    wait_until(
        lambda: server.metric(name, **labels) == expected,
        f"{name} {labels} at {expected}",
        told=lambda: f"it is at {server.metric(name, **labels)}",
    )
    return expected


def iterations(server: Served) -> float:
    """Steps of the engine. The engine reports them at most ten times a second and when idle."""
    return server.metric("nv_trt_llm_general_metrics", general_type="iteration_counter")


def wait_for_steps(server: Served, count: float) -> None:
    """Return once the engine has reported this total of steps and is idle."""
    wait_until(
        lambda: iterations(server) >= count,
        f"{count} steps",
        told=lambda: f"{iterations(server)} were told of",
    )
    assert settled(server, "nv_trt_llm_request_metrics", 0, request_type="active") == 0


def test_a_request_to_the_ensemble_counts_once_in_every_model(plain_server):
    name = "nv_inference_request_success"
    before = {model: plain_server.metric(name, model=model) for model in STEPS}
    body = {"text_input": "Once upon a time", "max_tokens": 5}
    for _ in range(3):
        assert plain_server.post("/v2/models/ensemble/generate", body)[0] == 200

    after = {model: plain_server.metric(name, model=model) for model in STEPS}
    assert {model: after[model] - before[model] for model in STEPS} == dict.fromkeys(STEPS, 3)


def test_each_phase_of_the_ensemble_lasts_as_long_as_those_of_its_steps(plain_server):
    body = {"text_input": "Once upon a time", "max_tokens": 5}
    phases = ("request", "compute_input", "compute_infer", "compute_output")

    def spent() -> dict[tuple[str, str], float]:
        return {
            (model, phase): plain_server.metric(
                f"nv_inference_{phase}_duration_us", model=model
            )
            for model in STEPS
            for phase in phases
        }

    before = spent()
    for _ in range(5):
        assert plain_server.post("/v2/models/ensemble/generate", body)[0] == 200
    after = spent()
    for phase in phases:
        ensemble, *steps = (after[m, phase] - before[m, phase] for m in STEPS)
        # Each figure is cut to microseconds.
        assert ensemble >= sum(steps) - len(steps), phase


def test_token_lengths_and_latencies_are_observed(plain_server):
    def count(name: str) -> float:
        return plain_server.metric(name, model="tensorrt_llm")

    names = ("trimaran_time_to_first_token_seconds_count", "nv_llm_output_token_len_count")
    before = [count(name) for name in names]
    gaps = count("trimaran_inter_token_latency_seconds_count")
    total = plain_server.metric("nv_llm_output_token_len_sum", model="tensorrt_llm")
    body = {
        "input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 9, "end_id": -1
    }  # fmt: skip
    assert plain_server.post("/v2/models/tensorrt_llm/generate", body)[0] == 200

    assert [count(name) for name in names] == [value + 1 for value in before]
    assert count("trimaran_inter_token_latency_seconds_count") == gaps + 8
    assert plain_server.metric("nv_llm_output_token_len_sum", model="tensorrt_llm") == total + 9


def test_engine_gauges_return_to_idle_and_the_iteration_counter_moves(plain_server):
    before = iterations(plain_server)
    body = {"text_input": "Once upon a time", "max_tokens": 30}
    assert plain_server.post("/v2/models/ensemble/generate", body)[0] == 200

    wait_for_steps(plain_server, before + 25)
    name = "nv_trt_llm_kv_cache_block_metrics"
    assert settled(plain_server, name, 0, kv_cache_block_type="used") == 0


def test_busy_time_of_the_engine_grows_during_work_and_not_when_idle(plain_server):
    parts = ("receive", "schedule", "launch", "emit", "device", "sample")

    def seconds() -> dict[str, float]:
        name = "trimaran_engine_seconds"
        return {
            part: plain_server.metric(name, model="tensorrt_llm", part=part) for part in parts
        }

    before, num_steps = seconds(), iterations(plain_server)
    body = {"text_input": "Once upon a time", "max_tokens": 30}
    start = time.monotonic()
    assert plain_server.post("/v2/models/ensemble/generate", body)[0] == 200
    wait_for_steps(plain_server, num_steps + 25)
    passed = time.monotonic() - start
    after = seconds()

    assert all(after[part] > before[part] for part in parts)
    assert sum(after[part] - before[part] for part in parts[:4]) <= passed
    time.sleep(0.3)
    assert seconds() == after


def test_a_repeated_prompt_reuses_its_blocks(plain_server):
    label = {"kv_cache_block_type": "reused"}
    name = "nv_trt_llm_kv_cache_block_metrics"
    ids = list(range(100, 200))
    body = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": 2}
    num_steps = iterations(plain_server)
    assert plain_server.post("/v2/models/tensorrt_llm/generate", body)[0] == 200
    wait_for_steps(plain_server, num_steps + 2)
    before = plain_server.metric(name, **label)
    assert plain_server.post("/v2/models/tensorrt_llm/generate", body)[0] == 200

    # 100 tokens fill three blocks of 32 and begin another one.
    assert settled(plain_server, name, before + 4, **label) == before + 4


def test_metrics_and_log_name_backends_transports_and_start_times(decoupled_server):
    operators = {
        labels["operator"]
        for labels, value in decoupled_server.samples("trimaran_backend_info")
    }
    transports = {
        labels["collective"]: labels["transport"]
        for labels, _ in decoupled_server.samples("trimaran_transport_info")
    }
    ((start, _),) = decoupled_server.samples("trimaran_start_method_info")

    assert {"linear", "paged_attention", "sampling"} <= operators
    assert transports["all_reduce"] == "shared_memory"
    assert transports["control"] == "shm_ring"
    assert start["start_method"] == "mpirun"
    assert start["world_size"] == "2"
    log = decoupled_server.log()
    for word in ("backends=", "transports=", "start_method=mpirun", "paged_attention"):
        assert word in log


def test_all_processes_together_idle_below_two_percent_of_a_core(decoupled_server):
    time.sleep(1)
    processes = list(decoupled_server.record_tree().values())

    def cpu_s() -> float:
        total = 0.0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    shares = []
    # Other threads, such as the garbage collector, do not run in every interval.
    while len(shares) < 3 and min(shares, default=1.0) >= 0.02:
        before, started = cpu_s(), time.monotonic()
        time.sleep(5)
        shares.append((cpu_s() - before) / (time.monotonic() - started))
    assert min(shares) < 0.02, shares
