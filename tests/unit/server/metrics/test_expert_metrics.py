"""The metrics of how many tokens chose each expert."""

from __future__ import annotations

import numpy as np

from trimaran.comm.messages.messages import ExpertReport
from trimaran.server.metrics.metrics import Metrics


def report(*rows: list[int]) -> ExpertReport:
    """Counts of the layers 1, 2 and so on."""
    counts = np.array(rows, dtype="<i8").tobytes()
    return ExpertReport(layers=list(range(1, 1 + len(rows))), counts=counts)


def series(metrics: Metrics, name: str) -> dict[str, float]:
    """Values by the labels beside the model's and version's."""
    start = f"trimaran_expert_{name}{{"
    lines = metrics.render().decode().splitlines()
    parts = [line[len(start) :].split("} ") for line in lines if line.startswith(start)]
    return {
        labels.removesuffix(',version="1"').replace(',model="m"', ""): float(value)
        for labels, value in parts
    }


def test_tokens_are_shown_by_layer_and_expert_with_their_imbalance():
    metrics = Metrics()
    metrics.add_engine("m", "1")
    assert not series(metrics, "tokens")

    metrics.add_expert_tokens("m", "1", report([1, 3], [4, 4]), "m/0")
    metrics.add_expert_tokens("m", "1", report([10, 0], [0, 0]), "m/1")

    assert series(metrics, "tokens") == {
        'expert="0",layer="1"': 11, 'expert="1",layer="1"': 3,
        'expert="0",layer="2"': 4, 'expert="1",layer="2"': 4,
    }  # fmt: skip
    assert series(metrics, "imbalance") == {'layer="1"': 11 / 7, 'layer="2"': 1.0}


def test_counters_of_an_engine_restarted_under_an_earlier_front_end_start_at_its_first_report():
    metrics = Metrics()
    metrics.add_expert_tokens("m", "1", report([5, 7]), "m/0", incarnation=1)
    metrics.add_expert_tokens("m", "1", report([6, 9]), "m/0", incarnation=1)
    assert series(metrics, "tokens") == {'expert="0",layer="1"': 1, 'expert="1",layer="1"': 2}


def test_counters_continue_over_an_engine_restart_and_reset_with_a_removed_model():
    metrics = Metrics()
    metrics.add_expert_tokens("m", "1", report([5, 7]), "m/0")
    metrics.add_expert_tokens("m", "1", report([6, 9]), "m/0")
    assert series(metrics, "tokens") == {'expert="0",layer="1"': 6, 'expert="1",layer="1"': 9}

    metrics.add_expert_tokens("m", "1", report([1, 2]), "m/0")
    assert series(metrics, "tokens") == {'expert="0",layer="1"': 7, 'expert="1",layer="1"': 11}

    metrics.add_engine("m", "1")
    metrics.remove_engine("m", "1")
    assert not series(metrics, "tokens")
    metrics.add_expert_tokens("m", "1", report([1, 2]), "m/0")
    assert series(metrics, "tokens") == {'expert="0",layer="1"': 1, 'expert="1",layer="1"': 2}
