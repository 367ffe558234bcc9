"""The metrics port and what its families say."""

import json
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as strict_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families

from trimaran.comm.errors import ConfigError
from trimaran.server.metrics.group_board import GroupBoard
from trimaran.server.metrics.host_metrics import Nvml
from trimaran.server.metrics.metrics import Metrics

NV_INFERENCE = (
    "request_success", "count", "exec_count", "request_duration_us", "queue_duration_us",
    "compute_input_duration_us", "compute_infer_duration_us", "compute_output_duration_us",
    "pending_request_count",
)  # fmt: skip


def scrape(server):
    with urllib.request.urlopen(f"{server.metrics_url}/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        return parse(response.read())


def parse(text):
    samples = {}
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def of(name, model="double", **labels):
    pairs = {"model": model, "version": "1", **labels}.items()
    pairs = sorted(pairs, key=lambda pair: (pair[0] in ("le", "quantile"), pair[0]))
    return name + "{" + ",".join(f'{k}="{v}"' for k, v in pairs) + "}"


def test_a_scraper_that_takes_openmetrics_alone_gets_openmetrics(server):
    request = urllib.request.Request(f"{server.metrics_url}/metrics")
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        families = len(list(text_families(response.read().decode())))
    request.add_header("Accept", "application/openmetrics-text; version=1.0.0")
    with urllib.request.urlopen(request) as response:
        kind = response.headers["Content-Type"]
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert len(list(strict_families(response.read().decode()))) == families


def observe_lengths(metrics, model, num_input, num_output):
    series = metrics.request_series(model, "1")
    series.input_tokens.observe(num_input)
    series.output_tokens.observe(num_output)


def infer_double(server, batch=1):
    tensor = {"name": "X", "shape": [batch, 2], "datatype": "INT32", "data": [0] * 2 * batch}
    return server.post("/v2/models/double/infer", {"inputs": [tensor]})


def fail(server, kind):
    tensor = {"name": "KIND", "shape": [1], "datatype": "BYTES", "data": [kind]}
    return server.post("/v2/models/fail/infer", {"inputs": [tensor]})


def test_every_family_of_every_model_is_there_with_zero_from_the_start(fresh_server):
    samples = scrape(fresh_server)
    for model in ("double", "repeat"):
        for name in NV_INFERENCE:
            assert samples[of(f"nv_inference_{name}", model)] == 0
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
            name = of("nv_inference_request_failure", model, reason=reason)
            assert samples[name] == 0
    assert samples["nv_cpu_memory_total_bytes"] > 0
    assert 0 <= samples["nv_cpu_utilization"] <= 1
    assert "nv_pinned_memory_pool_total_bytes" in samples


def test_success_counts_requests_and_their_batches(fresh_server):
    infer_double(fresh_server)
    infer_double(fresh_server, batch=3)
    samples = scrape(fresh_server)
    assert samples[of("nv_inference_request_success")] == 2
    assert samples[of("nv_inference_count")] == 4
    assert samples[of("nv_inference_exec_count")] == 2
    assert samples[of("nv_inference_request_duration_us")] > 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("INTERNAL", "BACKEND"), ("INVALID_ARG", "OTHER"), ("UNAVAILABLE", "REJECTED"),
     ("full", "REJECTED"), ("dead", "BACKEND"), ("CANCELLED", "CANCELED"), ("bug", "OTHER")],
)  # fmt: skip
def test_failures_count_under_their_reason(fresh_server, kind, reason):
    fail(fresh_server, kind)
    samples = scrape(fresh_server)
    for label in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        name = of("nv_inference_request_failure", "fail", reason=label)
        assert samples[name] == (label == reason)
    assert samples[of("nv_inference_request_success", "fail")] == 0


def test_a_request_that_fails_validation_is_not_counted(fresh_server):
    tensor = {"name": "KIND", "shape": [2], "datatype": "BYTES", "data": ["none", "none"]}
    answer = fresh_server.post("/v2/models/fail/infer", {"inputs": [tensor]})
    assert answer.status == 400
    samples = scrape(fresh_server)
    for label in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert samples[of("nv_inference_request_failure", "fail", reason=label)] == 0


def test_the_tags_of_a_model_are_labels_of_its_own_series(fresh_server):
    samples = scrape(fresh_server)
    tags = '{_site="a \\"b\\"",_team="7",'
    for name in ("nv_inference_request_success", "nv_model_load_duration_secs"):
        assert f'{name}{tags}model="squeeze",version="1"}}' in samples
        assert of(name) in samples
    assert sum(tags in name for name in samples) == len(NV_INFERENCE) + 5


def test_gpu_metrics_exist_only_on_hosts_with_gpus(server):
    names = {name.partition("{")[0] for name in scrape(server)}
    shown = {name for name in names if name.startswith(("nv_gpu_", "nv_energy_"))}
    nvml = Nvml.open()
    assert (len(shown) >= 4) == (nvml is not None and bool(nvml.read()))


def test_counters_keep_the_metric_names_of_triton(fresh_server):
    with urllib.request.urlopen(f"{fresh_server.metrics_url}/metrics") as response:
        text = response.read().decode()
    assert "# TYPE nv_inference_count counter" in text
    assert "_total{" not in text
    assert "_created" not in text


def test_other_paths_answer_200_with_nothing_and_other_methods_405(server):
    with urllib.request.urlopen(f"{server.metrics_url}/other") as response:
        assert (response.status, response.read()) == (200, b"")
    with urllib.request.urlopen(f"{server.metrics_url}/metrics/") as response:
        assert response.read()
    request = urllib.request.Request(f"{server.metrics_url}/metrics", data=b"")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.code == 405
    caught.value.close()


def test_the_last_iteration_of_an_engine_sets_every_in_flight_metric():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    zero = parse(metrics.render())
    assert zero[of("nv_trt_llm_request_metrics", "m", request_type="active")] == 0
    stats = {
        "active_requests": 5, "max_requests": 64, "scheduled_requests": 3,
        "context_requests": 1,
        "waiting_requests": 2, "generation_requests": 2, "paused_requests": 1,
        "total_context_tokens": 17, "micro_batch_id": 0, "kv_max_blocks": 200,
        "kv_free_blocks": 150, "kv_used_blocks": 50, "kv_tokens_per_block": 32,
        "kv_reused_blocks": 7, "iteration_counter": 99, "timestamp_us": 12,
        "cpu_memory_bytes": 1, "gpu_memory_bytes": 2, "pinned_memory_bytes": 3,
    }  # fmt: skip
    metrics.set_engine_stats("m", "1", stats)
    samples = parse(metrics.render())
    families = {
        ("nv_trt_llm_request_metrics", "request_type"): {
            "active": 5, "max": 64, "scheduled": 3, "context": 1, "waiting": 2,
        },
        ("nv_trt_llm_runtime_memory_metrics", "memory_type"): {"cpu": 1, "gpu": 2, "pinned": 3},
        ("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"): {
            "max": 200, "free": 150, "used": 50, "tokens_per": 32, "reused": 7,
            "fraction": 0.25,
        },
        ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric"): {
            "total_context_tokens": 17, "generation_requests": 2, "micro_batch_id": 0,
            "paused_requests": 1,
        },
        ("nv_trt_llm_general_metrics", "general_type"): {
            "timestamp": 12, "iteration_counter": 99,
        },
    }  # fmt: skip
    for (family, label), values in families.items():
        found = {name: samples[of(family, "m", **{label: name})] for name in values}
        assert found == values


def test_static_batching_has_metrics_of_its_own(caplog):
    metrics = Metrics()
    metrics.add_engine("m", "1")
    assert "nv_trt_llm_v1_metrics" not in metrics.render().decode()
    stats = {"v1_batching": 1, "total_context_tokens": 17, "total_generation_tokens": 3,
             "empty_generation_slots": 2}  # fmt: skip
    with caplog.at_level("DEBUG"):
        metrics.set_engine_stats("m", "1", stats)

    samples = parse(metrics.render())
    family = {
        name: samples[of("nv_trt_llm_v1_metrics", "m", v1_specific_metric=name)]
        for name in (
            "total_context_tokens",
            "total_generation_tokens",
            "empty_generation_slots",
        )
    }
    assert list(family.values()) == [17, 3, 2]
    assert not [name for name in samples if name.startswith("nv_trt_llm_inflight")]
    logged = json.loads(caplog.records[0].getMessage().partition(": ")[2])
    assert (logged["Total Generation Tokens"], logged["Empty Generation Slots"]) == (3, 2)
    assert "MicroBatch ID" not in logged


def test_the_verbose_log_has_the_engines_statistics_as_one_json_line(caplog):
    metrics = Metrics()
    observe_lengths(metrics, "m", 11, 600)
    observe_lengths(metrics, "m", 2, 3)
    observe_lengths(metrics, "other", 1000, 1000)
    stats = {"active_requests": 5, "kv_max_blocks": 200, "kv_used_blocks": 50,
             "iteration_counter": 7, "timestamp_us": 1_700_000_000_000_000}  # fmt: skip
    metrics.set_engine_stats("m", "1", stats)
    assert caplog.records == []
    with caplog.at_level("DEBUG"):
        metrics.set_engine_stats("m", "1", stats)
    record, last = caplog.records
    model, _, line = record.getMessage().partition(": ")
    values = json.loads(line)
    totals = json.loads(last.getMessage().partition(": ")[2])
    assert model == "m"
    assert values["Active Request Count"] == 5
    assert values["Iteration Counter"] == 7
    assert values["Fraction used KV cache blocks"] == 0.25
    assert values["Timestamp"] == "11-14-2023 22:13:20.000000"
    assert totals == {"Total Input Tokens": 13, "Total Output Tokens": 603}


def test_each_value_of_the_iteration_line_is_one_sample_of_the_metrics(caplog):
    metrics = Metrics()
    metrics.add_engine("m", "1")
    stats = {"active_requests": 5, "kv_max_blocks": 200, "kv_used_blocks": 200,
             "iteration_counter": 7, "timestamp_us": 1_700_000_000_000_000}  # fmt: skip
    with caplog.at_level("DEBUG"):
        metrics.set_engine_stats("m", "1", stats)
    values = json.loads(caplog.records[0].getMessage().partition(": ")[2])
    samples = {n: v for n, v in parse(metrics.render()).items() if n.startswith("nv_trt_llm_")}
    assert len(samples) == len(values) == 22
    del values["Timestamp"]
    shown = [v for n, v in samples.items() if 'general_type="timestamp"' not in n]
    assert sorted(shown) == sorted(values.values())
    for figure in ("kv_cache_transfer_ms", "request_count"):
        name = "nv_trt_llm_disaggregated_serving_metrics"
        assert samples[of(name, "m", disaggregated_serving_type=figure)] == 0


@pytest.mark.parametrize(
    ("minor", "num_samples"), [(6, 16), (9, 17), (12, 17), (13, 18), (17, 20)]
)
def test_samples_and_log_are_those_of_the_repositorys_version(caplog, minor, num_samples):
    metrics = Metrics()
    metrics.set_backend_version("m", "1", minor)
    metrics.add_engine("m", "1")
    stats = {"paused_requests": 3, "timestamp_us": 1_700_000_000_500_000}
    with caplog.at_level("DEBUG"):
        metrics.set_engine_stats("m", "1", stats)
    values = json.loads(caplog.records[0].getMessage().partition(": ")[2])
    samples = {n: v for n, v in parse(metrics.render()).items() if n.startswith("nv_trt_llm_")}
    assert len(samples) == len(values) == num_samples
    assert all("_statistics{" in name for name in samples) is (minor == 6)
    moment = next(v for n, v in samples.items() if 'general_type="timestamp"' in n)
    is_old = minor < 12
    assert moment == (1_700_000_000 if is_old else 1_700_000_000_500_000)
    assert values["Timestamp"] == "11-14-2023 22:13:20" + ("" if is_old else ".500000")
    names = {"Paused Requests", "Terminated Requests"} & values.keys()
    assert names == (
        {"Paused Requests"} if minor >= 10 else {"Terminated Requests"} if minor >= 8 else set()
    )
    metrics.remove_engine("m", "1")
    assert b"nv_trt_llm_" not in metrics.render()


def test_an_operator_can_name_the_version_of_the_samples():
    metrics = Metrics({"trtllm_version": "0.17"})
    metrics.set_backend_version("m", "1", 9)
    metrics.add_engine("m", "1")
    text = metrics.render().decode()
    assert 'type="paused_requests"' not in text
    assert 'specific_metric="paused_requests"' in text
    assert 'request_type="waiting"' not in text


def test_every_phase_of_a_request_is_counted_to_the_microsecond(fresh_server):
    for _ in range(50):
        infer_double(fresh_server)
    samples = scrape(fresh_server)
    phases = {
        phase: samples[of(f"nv_inference_{phase}_duration_us")]
        for phase in ("compute_input", "queue", "compute_infer", "compute_output")
    }
    assert min(phases["compute_input"], phases["compute_infer"], phases["compute_output"]) > 0
    total = samples[of("nv_inference_request_duration_us")]
    assert total - 4 <= sum(phases.values()) <= total + 1


def test_help_texts_are_those_of_triton(server):
    with urllib.request.urlopen(f"{server.metrics_url}/metrics") as response:
        text = response.read().decode()
    for line in (
        "nv_inference_count Number of inferences performed (does not include cached requests)",
        "nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds "
        "(includes cached requests)",
        "nv_inference_compute_output_duration_us Cumulative inference compute output duration "
        "in microseconds (does not include cached requests)",
        "nv_inference_pending_request_count Instantaneous number of pending requests awaiting "
        "execution per-model.",
    ):
        assert f"# HELP {line}\n" in text


def test_token_histograms_have_the_known_buckets():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    observe_lengths(metrics, "m", 11, 600)
    metrics.request_series("m", "1").first_token.observe(0.03)
    metrics.request_series("m", "1").inter_token.observe(0.004)
    samples = parse(metrics.render())

    def bucket(le):
        labels = {"response_metric_type": "total_input_tokens", "le": le}
        return samples[of("nv_llm_input_token_len_bucket", "m", **labels)]

    assert [bucket(le) for le in ("10", "50", "100", "500", "1000", "+Inf")] == [
        0, 1, 1, 1, 1, 1,
    ]  # fmt: skip
    name = of("nv_llm_output_token_len_sum", "m", response_metric_type="total_output_tokens")
    assert samples[name] == 600
    assert samples[of("trimaran_time_to_first_token_seconds_bucket", "m", le="0.04")] == 1
    assert samples[of("trimaran_time_to_first_token_seconds_count", "m")] == 1
    assert samples[of("trimaran_inter_token_latency_seconds_sum", "m")] == 0.004


def test_facts_of_an_engine_replace_its_earlier_facts():
    metrics = Metrics()
    facts = {"backends": {"attention": "torch"}, "transports": {"all_reduce": "shm"},
             "start_method": "mpirun", "mpi": "Open MPI 5", "world_size": 2, "tp_size": 2,
             "pp_size": 1, "stages": "4"}  # fmt: skip
    metrics.set_engine_info("m", "1", {**facts, "backends": {"attention": "other"}})
    metrics.set_engine_info("m", "1", facts)
    samples = parse(metrics.render())
    shown = [name for name in samples if name.startswith("trimaran_backend_info")]
    assert shown == [of("trimaran_backend_info", "m", operator="attention", backend="torch")]
    transport = {"collective": "all_reduce", "transport": "shm"}
    assert samples[of("trimaran_transport_info", "m", **transport)] == 1
    metrics.group_state("m", "g0", is_up=False, num_restarts=3)
    samples = parse(metrics.render())
    assert samples[of("trimaran_group_up", "m", group="g0")] == 0
    assert samples[of("trimaran_group_restarts", "m", group="g0")] == 3


def test_statistics_of_all_groups_of_a_model_are_shown_as_one_engine():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    first = {"kv_max_blocks": 100, "kv_used_blocks": 10, "kv_tokens_per_block": 32,
             "active_requests": 3, "timestamp_us": 7}  # fmt: skip
    second = {**first, "kv_used_blocks": 40, "active_requests": 4, "timestamp_us": 5}
    metrics.set_engine_stats("m", "1", first, "m")
    metrics.set_engine_stats("m", "1", second, "m#1")
    blocks, label = "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type"

    def shown():
        samples = parse(metrics.render())
        found = {
            name: samples[of(blocks, "m", **{label: name})]
            for name in ("max", "used", "tokens_per", "fraction")
        }
        found["active"] = samples[of("nv_trt_llm_request_metrics", "m", request_type="active")]
        return found

    both = {"max": 200, "used": 50, "tokens_per": 32, "fraction": 0.25, "active": 7}
    assert shown() == both
    metrics.add_engine("m", "1")
    assert shown() == both
    metrics.drop_engine_stats("m", "1", "m#1")
    assert shown() == {"max": 100, "used": 10, "tokens_per": 32, "fraction": 0.1, "active": 3}


def test_counters_never_decrease_over_engine_restarts():
    metrics = Metrics()
    metrics.add_engine("m", "1")

    def shown(*told, down=""):
        for group, steps, pauses in told:
            stats = {"iteration_counter": steps, "paused_tokens": pauses}
            metrics.set_engine_stats("m", "1", stats, group)
        if down:
            metrics.drop_engine_stats("m", "1", down)
        samples = parse(metrics.render())
        steps = of("nv_trt_llm_general_metrics", "m", general_type="iteration_counter")
        return samples[steps], samples[of("trimaran_pauses", "m", type="tokens")]

    assert shown(("m", 100, 5), ("m#1", 40, 2)) == (140, 7)
    assert shown(down="m#1") == (140, 7)
    # This engine restarts; the other engine only lost its connection.
    assert shown(("m#1", 3, 0)) == (143, 7)
    assert shown(down="m") == (143, 7)
    assert shown(("m", 110, 6)) == (153, 8)
    metrics.remove_group("m", "1", "m#1")
    assert shown(("m#1", 4, 0)) == (157, 8)
    metrics.remove_engine("m", "1")
    metrics.add_engine("m", "1")
    assert shown(("m", 2, 1)) == (2, 1)


def test_a_removed_engine_leaves_no_series_and_its_successor_starts_at_0():
    metrics = Metrics()
    nothing = metrics.render()
    facts = {"backends": {"attention": "torch"}, "transports": {}, "start_method": "spawn"}

    def fill():
        metrics.add_engine("m", "1")
        for group in ("m", "m#1"):
            metrics.group_state("m", group, is_up=True, num_restarts=0)
            metrics.set_engine_info("m", "1", facts, group)
            metrics.set_engine_stats("m", "1", {"active_requests": 3}, group)

    fill()
    fresh = metrics.render()
    observe_lengths(metrics, "m", 3, 4)
    metrics.request_series("m", "1").first_token.observe(0.1)
    metrics.request_series("m", "1").inter_token.observe(0.1)
    metrics.remove_group("m", "1", "m#1")
    assert of("trimaran_group_up", "m", group="m#1") not in parse(metrics.render())
    assert parse(metrics.render())[of("trimaran_backend_info", "m", operator="attention",
                                      backend="torch")] == 1  # fmt: skip
    metrics.remove_engine("m", "1")
    assert metrics.render() == nothing
    fill()
    assert metrics.render() == fresh


def test_process_and_fault_metrics_come_from_the_group_board():
    metrics, board = Metrics(), GroupBoard()
    metrics.show_board(board)
    board.update("m#1", {"model": "m", "state": "down", "fault_time": 1e9, "num_restarts": 1})
    board.update("orchestrator", {"state": "down", "num_restarts": 2, "fault_time": 2e9})
    board.update("frontend", {"state": "up"})
    samples = parse(metrics.render())
    found = {name: value for name, value in samples.items() if name.startswith("trimaran_")}
    assert found == {
        'trimaran_process_up{process="frontend"}': 1,
        'trimaran_process_up{process="orchestrator"}': 0,
        'trimaran_process_restarts{process="frontend"}': 0,
        'trimaran_process_restarts{process="orchestrator"}': 2,
        'trimaran_last_fault_timestamp_seconds{group="m#1",model="m"}': 1e9,
        'trimaran_last_fault_timestamp_seconds{group="orchestrator",model=""}': 2e9,
    }
    board.remove("m#1")
    assert not any('group="m#1"' in name for name in parse(metrics.render()))


def test_latency_families_follow_the_configuration(server):
    assert "nv_inference_first_response_histogram_ms" not in str(scrape(server))
    metrics = Metrics(
        {
            "counter_latencies": "false",
            "histogram_latencies": "true",
            "summary_latencies": "true",
            "summary_quantiles": "0.5:0.05,0.9:0.01",
        }
    )
    server.repeat.name = "repeat"
    metrics.measure(server.repeat)
    text = metrics.render().decode()
    assert "nv_inference_request_duration_us" not in text
    buckets = 'nv_inference_first_response_histogram_ms_bucket{model="repeat",version="1",le='
    for le in ("100", "500", "2000", "5000", "+Inf"):
        assert f'{buckets}"{le}"' in text
    quantile = 'nv_inference_queue_summary_us{model="repeat",version="1",quantile='
    assert f'{quantile}"0.5"}} Nan' in text
    assert f'{quantile}"0.99"' not in text


@pytest.mark.parametrize("values", [{"x": "1"}, {"histogram_latencies": "yes"},
                                    {"summary_quantiles": "a"},
                                    {"summary_quantiles": "0.5:0,nan:0"},
                                    {"summary_quantiles": "-2:0.1"},
                                    {"summary_quantiles": "99:0.1"},
                                    {"summary_quantiles": "0.9:0.1,0.90:0"},
                                    {"trtllm_version": "0.5"}])  # fmt: skip
def test_a_wrong_metrics_configuration_is_refused(values):
    with pytest.raises(ConfigError, match="--metrics-config"):
        Metrics(values)
