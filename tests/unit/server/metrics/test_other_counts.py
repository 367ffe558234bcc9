"""Counts of several front ends become those of one server."""

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.server.metrics.metrics import Metrics
from trimaran.server.metrics.model_statistics import ModelStatistics


class Plain:
    """A model that is only counted."""

    name, version, is_ready, is_decoupled = "m", "1", True, False
    config = ModelConfig(name="m")


def counted(num_requests, batch_size=1):
    """The metrics and statistics of a front end that answered so many requests."""
    metrics = Metrics({"histogram_latencies": "true"})
    model = metrics.measure(Plain())
    metrics.add_engine("m", "1")
    for _ in range(num_requests):
        model.metrics.success(
            batch_size=batch_size, executed_batch=batch_size,
            total_ns=30_000, input_ns=2_000, queue_ns=10_000, infer_ns=15_000,
        )  # fmt: skip
        metrics.request_series("m", "1").first_token.observe(0.03)
    return metrics, model.statistics


def wire(num_requests, num_running=0, batch_size=1):
    metrics, statistics = counted(num_requests, batch_size)
    return metrics.own_counts([statistics.message()], num_running)


def value(metrics, name):
    (line,) = [x for x in metrics.render().decode().splitlines() if x.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


@pytest.fixture
def first():
    return counted(2)


def test_counters_histograms_and_running_requests_of_front_ends_are_summed(first):
    metrics, _ = first

    metrics.others.take(1, wire(3, num_running=4))
    metrics.others.take(2, wire(5, num_running=1))

    assert value(metrics, "nv_inference_request_success") == 10
    assert value(metrics, "trimaran_time_to_first_token_seconds_count") == 10
    assert value(metrics, "nv_inference_request_duration_us") == 300
    assert metrics.others.num_running == 5
    assert metrics.latency_counts()["m", "1"].first_token.total == 10


def test_later_counts_of_a_front_end_replace_earlier_ones(first):
    metrics, _ = first

    metrics.others.take(1, wire(3))
    metrics.others.take(1, wire(4))

    assert value(metrics, "nv_inference_request_success") == 6


def test_a_new_first_front_end_takes_over_the_counts_of_the_previous_one(first):
    metrics, statistics = first
    metrics.others.take(1, wire(3, num_running=4))
    metrics.others.lost(1)
    metrics.others.take(2, wire(5))
    left = metrics.others.legacy(metrics.own_counts([statistics.message()], 6))

    successor, its_statistics = counted(1)
    successor.others.inherit(left)
    successor.others.take(2, wire(7))

    message = its_statistics.message()
    successor.others.add_statistics(message)
    # Two of the last one, three of a dead one, seven of a living one, and its own.
    assert value(successor, "nv_inference_request_success") == 13
    assert value(successor, "trimaran_time_to_first_token_seconds_count") == 13
    assert message.inference_stats.success.count == 13
    assert successor.others.num_running == 0


def test_counters_of_a_dead_front_end_are_kept_and_its_running_requests_dropped(first):
    metrics, statistics = first
    metrics.others.take(1, wire(3, num_running=4))

    metrics.others.lost(1)
    metrics.others.take(1, wire(1))

    message = statistics.message()
    metrics.others.add_statistics(message)
    assert value(metrics, "nv_inference_request_success") == 6
    assert message.inference_stats.success.count == 6
    assert metrics.others.num_running == 0


def test_statistics_are_added_by_batch_size(first):
    metrics, statistics = first
    metrics.others.take(1, wire(3, batch_size=1))
    metrics.others.take(2, wire(2, batch_size=8))

    message = statistics.message()
    metrics.others.add_statistics(message)

    assert message.inference_count == 2 + 3 + 16
    assert message.inference_stats.queue.ns == 70_000
    batches = {b.batch_size: b.compute_infer.count for b in message.batch_stats}
    assert batches == {1: 5, 8: 2}


def test_counters_of_a_removed_model_start_at_0_everywhere(first):
    metrics, _ = first
    metrics.others.take(1, wire(3))
    metrics.others.lost(1)
    metrics.others.take(2, wire(5))

    metrics.forget("m", "1")
    metrics.measure(Plain())
    message = ModelStatistics("m", "1").message()
    metrics.others.add_statistics(message)

    assert value(metrics, "nv_inference_request_success") == 0
    assert message.inference_stats.success.count == 0


def test_counts_of_a_model_ended_early_at_one_front_end_stay_until_its_removal(first):
    metrics, statistics = first
    metrics.others.take(1, wire(3))

    metrics.others.take(1, Metrics().own_counts([], 0))

    message = statistics.message()
    metrics.others.add_statistics(message)
    assert value(metrics, "nv_inference_request_success") == 5
    assert value(metrics, "trimaran_time_to_first_token_seconds_count") == 5
    assert message.inference_stats.success.count == 5
    metrics.forget("m", "1")
    metrics.measure(Plain())
    assert value(metrics, "nv_inference_request_success") == 0
    metrics.remove_engine("m", "1")
    metrics.add_engine("m", "1")
    assert value(metrics, "trimaran_time_to_first_token_seconds_count") == 0


def test_engine_counters_continue_over_a_reload_of_the_model(first):
    metrics, _ = first
    metrics.others.take(1, wire(3))

    metrics.forget("m", "1")
    metrics.others.take(1, wire(4))

    metrics.measure(Plain())
    assert value(metrics, "nv_inference_request_success") == 0
    assert value(metrics, "trimaran_time_to_first_token_seconds_count") == 6
    metrics.others.caught_up(1, "m")
    metrics.others.take(1, wire(4))
    assert value(metrics, "nv_inference_request_success") == 4


def test_facts_of_engines_are_not_summed_over_front_ends(first):
    metrics, _ = first
    other, statistics = counted(0)
    for each in (metrics, other):
        each.set_engine_stats("m", "1", {"active_requests": 7.0}, "g")

    metrics.others.take(1, other.own_counts([statistics.message()], 0))

    lines = metrics.render().decode().splitlines()
    active = [x for x in lines if 'request_type="active"' in x]
    assert [line.rpartition(" ")[2] for line in active] == ["7"]
