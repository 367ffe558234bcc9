"""Admission by the forecast peak of the KV cache."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.scheduling.kv_forecast import KVForecast
from trimaran.worker.scheduling.preemption import tokens_per_read


def finish_all(planner):
    """Run all steps; returns the numbers of the requests that were preempted."""
    paused = set()
    while planner.scheduler.has_requests:
        planner.step()
        paused |= {s.request.number for s in planner.scheduler.waiting if s.is_preempted}
    return paused


def test_outputs_that_reach_their_limit_are_forecast_at_full_length():
    forecast = KVForecast(1)
    for _ in range(2000):
        forecast.observe(100, is_at_limit=True)

    assert forecast.expected(np.array([1.0, 500.0])) == pytest.approx([1.0, 500.0], rel=0.02)


def test_outputs_that_end_early_are_forecast_shorter():
    forecast = KVForecast(1024)
    rng = np.random.default_rng(0)
    for length in rng.geometric(1 / 40, 4000):
        forecast.observe(min(int(length), 100), is_at_limit=length > 100)

    assert forecast.expected(np.array([10_000.0]))[0] == pytest.approx(40, rel=0.2)


def test_the_forecast_forgets_old_outputs():
    forecast = KVForecast(1024)
    for length in [1000] * 3000 + [10] * 3000:
        forecast.observe(length, is_at_limit=False)

    assert forecast.expected(np.array([10_000.0]))[0] == pytest.approx(10, rel=0.05)


def test_no_sequence_is_preempted_after_the_forecast_has_seen_long_outputs():
    planner = Planner(num_blocks=16, enable_reuse=False)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=6 * BLOCK)
    first = finish_all(planner)
    for _ in range(40):
        planner.add(BLOCK, max_tokens=6 * BLOCK)
    finish_all(planner)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=6 * BLOCK)

    assert first
    assert not finish_all(planner)


def test_early_ends_let_more_sequences_run_than_full_lengths_would_fit():
    planner = Planner(num_blocks=16, enable_reuse=False, expected_output_tokens=4)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=10 * BLOCK)
    planner.step()
    planner.step()

    assert len(planner.scheduler.running) > 2


def test_sequences_that_fit_at_their_limits_all_start():
    planner = Planner(num_blocks=8 * 6, enable_reuse=False, expected_output_tokens=4)
    for _ in range(8):
        planner.add(BLOCK, max_tokens=5 * BLOCK)
    planner.step()
    planner.step()

    assert len(planner.scheduler.running) == 8
    assert not finish_all(planner)


def test_a_burst_gets_the_forecast_of_single_arrivals_in_one_pass(monkeypatch):
    has_room, foretell = KVForecast.has_room, KVForecast._forecast
    num_looked_at, answers = 0, []

    def count(self, sequences, block_size):
        nonlocal num_looked_at
        num_looked_at += len(sequences)
        return foretell(self, sequences, block_size)

    def compare(self, running, newcomer, cache):
        nonlocal num_looked_at
        anew = KVForecast(20)
        anew.has_beams = self.has_beams
        before = num_looked_at
        expected = has_room(anew, running, newcomer, cache)
        num_looked_at = before
        answers.append((has_room(self, running, newcomer, cache), expected))
        return answers[-1][0]

    monkeypatch.setattr(KVForecast, "_forecast", count)
    monkeypatch.setattr(KVForecast, "has_room", compare)
    planner = Planner(
        num_blocks=300,
        max_num_seqs=400,
        max_num_batched_tokens=1600,
        max_beam_width=2,
        expected_output_tokens=20,
    )
    for number in range(400):
        planner.add(1 + number % 4, max_tokens=1 + number % 13, beam_width=1 + number % 2)
    planner.scheduler.schedule()

    num_started = len(planner.scheduler.running)
    assert 50 < num_started < 400
    assert answers == [(True, True)] * (num_started - 1) + [(False, False)]
    # Once as a newcomer, and once among the running sequences.
    assert num_looked_at <= 2 * num_started


@pytest.mark.parametrize(("tokens_per_read", "num_started"), [(0, 4), (1000, 6), (2, 4)])
def test_a_sequence_starts_despite_likely_preemption_when_small_batches_would_cost_more(
    tokens_per_read, num_started
):
    planner = Planner(
        num_blocks=24,
        enable_reuse=False,
        tokens_per_read=tokens_per_read,
        max_seq_len=6 * BLOCK,
    )
    for _ in range(40):
        planner.add(BLOCK, max_tokens=5 * BLOCK)
    finish_all(planner)
    before = planner.scheduler.step

    for _ in range(6):
        planner.add(BLOCK, max_tokens=5 * BLOCK)
    planner.step()
    planner.step()
    started = len(planner.scheduler.running)
    paused = finish_all(planner)

    assert started == num_started
    assert bool(paused) == (num_started == 6)
    assert len(planner.ended) == 46
    assert planner.scheduler.step - before < 2 * 5 * BLOCK + 4


def test_no_sequence_starts_shortly_before_blocks_run_out():
    planner = Planner(num_blocks=24, enable_reuse=False, tokens_per_read=10)
    for _ in range(40):
        planner.add(4 * BLOCK, max_tokens=2 * BLOCK)
    finish_all(planner)
    for _ in range(40):
        planner.add(4 * BLOCK, max_tokens=2 * BLOCK)

    assert not finish_all(planner)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 160),
        ({"dtype": "float32"}, 320),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336}, 585),
    ],
)
def test_reading_the_weights_costs_as_much_as_more_tokens_in_sparse_models(changes, expected):
    architecture = "MixtralForCausalLM" if "num_experts" in changes else "LlamaForCausalLM"
    values = {
        "architecture": architecture,
        "dtype": "bfloat16", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_size": 128, "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5, "hidden_act": "silu", "position_embedding_type": "rope_gpt_neox",
    }  # fmt: skip

    config = PretrainedConfig(**{**values, **changes})

    assert tokens_per_read(config, "cuda") == pytest.approx(expected, rel=0.03)
