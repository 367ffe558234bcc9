"""The counters of where an engine's time goes."""

from trimaran.comm.messages.messages import STATS_KEYS
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.metrics.step_metrics import PARTS


def seconds(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    found = {}
    for part in PARTS:
        start = f'trimaran_engine_seconds{{model="m",part="{part}",version="1"}} '
        for line in lines:
            if line.startswith(start):
                found[part] = float(line[len(start) :])
    return found


def stats(value: float) -> dict[str, float]:
    return dict.fromkeys(STATS_KEYS, value)


def test_every_part_is_reported_by_engines_and_shown_before_the_first_step():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    assert seconds(metrics) == dict.fromkeys(PARTS, 0.0)
    assert {f"{part}_seconds" for part in PARTS} <= set(STATS_KEYS)


def test_groups_of_a_model_add_up():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    metrics.set_engine_stats("m", "1", stats(2.0), "m/0")
    metrics.set_engine_stats("m", "1", stats(3.0), "m/1")
    metrics.set_engine_stats("m", "1", stats(5.0), "m/0")
    assert seconds(metrics) == dict.fromkeys(PARTS, 8.0)


def test_counters_continue_over_an_engine_restart_and_a_reconnection_counts_nothing_twice():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    metrics.set_engine_stats("m", "1", stats(4.0), "m")
    metrics.drop_engine_stats("m", "1", "m")
    metrics.set_engine_stats("m", "1", stats(4.5), "m")
    assert seconds(metrics) == dict.fromkeys(PARTS, 4.5)
    metrics.drop_engine_stats("m", "1", "m")
    metrics.set_engine_stats("m", "1", stats(1.0), "m")
    assert seconds(metrics) == dict.fromkeys(PARTS, 5.5)


def test_counters_of_an_engine_restarted_under_an_earlier_front_end_start_at_its_first_report():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    metrics.set_engine_stats("m", "1", stats(4.0), "m", incarnation=2)
    metrics.set_engine_stats("m", "1", stats(4.5), "m", incarnation=2)
    assert seconds(metrics) == dict.fromkeys(PARTS, 0.5)
    assert metrics.engine_values("m", "1")["iteration_counter"] == 0.5
    metrics.set_engine_stats("m", "1", stats(1.0), "m", incarnation=3)
    assert seconds(metrics) == dict.fromkeys(PARTS, 1.5)


def test_an_unloaded_model_shows_nothing_and_restarts_at_0():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    metrics.set_engine_stats("m", "1", stats(4.0), "m")
    metrics.remove_engine("m", "1")
    assert seconds(metrics) == {}
    metrics.add_engine("m", "1")
    assert seconds(metrics) == dict.fromkeys(PARTS, 0.0)
