"""Output that is computed again as decodes, for GPUs in deterministic mode: what steps compute,
and which tokens serve which sequences."""

from __future__ import annotations

import random
from array import array
from collections import deque

import pytest

from tests.driver import Driver
from tests.unit.worker.scheduling.test_scheduler import BLOCK, Planner
from tests.unit.worker.speculation.many_prompts import MODEL
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

LIMITS = {
    "num_blocks": 400, "enable_reuse": False, "max_num_batched_tokens": 512,
    "max_seq_len": 2048, "max_input_len": 2047,
}  # fmt: skip


def entries_of(step):
    """Rows, starts, counts and kinds of a step's entries."""
    decision = step.decision
    columns = (decision.rows, decision.num_computed_tokens, decision.num_scheduled_tokens)
    kinds = [place < decision.num_decodes for place in range(len(decision.rows))]
    return list(zip(*(column.tolist() for column in columns), kinds, strict=True))


def test_a_replayed_sequence_computes_its_prompt_then_each_output_token_as_a_decode():
    planner = Planner(**LIMITS, max_recompute_rows=30)
    planner.add(100, output=range(1, 71), max_tokens=80)
    steps = []
    while planner.scheduler.has_requests:
        step = planner.plan()
        steps.append((entries_of(step), step.decision.sampled.tolist()))
        assert step.num_scheduled == 1
        planner.answer(step)

    (row, *_), *_ = steps[0][0]
    assert steps[0] == ([(row, 0, 100, False)], [])
    # With the sequence's own row 30 decodes fit.
    assert [len(entries) for entries, _ in steps[1:5]] == [29, 29, 12, 1]
    known = [entry for entries, _ in steps[1:4] for entry in entries]
    assert known == [(row, start, 1, True) for start in range(100, 170)]
    assert [sampled for _, sampled in steps[1:5]] == [[], [], [11], [0]]
    assert len(steps) == 1 + 3 + 9


def test_rows_of_known_output_leave_a_row_to_each_running_sequence():
    planner = Planner(**LIMITS, max_recompute_rows=20)
    for _ in range(5):
        planner.add(8, max_tokens=60)
    planner.step()
    planner.add(8, output=range(1, 41), max_tokens=60)
    planner.add(8, output=range(1, 41), max_tokens=60)
    most = 0
    while planner.scheduler.has_requests:
        step = planner.plan()
        decodes = step.decision.num_decodes
        most = max(most, decodes)
        running = len(planner.scheduler.running)
        rows = step.decision.rows[:decodes].tolist()
        assert len(set(rows)) == step.num_scheduled - step.num_context
        assert step.num_generation_tokens == sum(step.decision.sampled < decodes)
        planner.answer(step)
        assert decodes <= 20 and running <= 7
    assert most >= 19
    assert len(planner.ended) == 7


def test_no_token_of_output_is_computed_with_a_prompt_and_none_of_a_prompt_as_a_decode():
    found = [run_history(random.Random(seed), can_cut=seed % 3 > 0) for seed in range(9)]

    num_preempted, num_again = zip(*found, strict=True)
    assert sum(map(bool, num_preempted)) >= 6
    assert sum(map(bool, num_again)) >= 4


def run_history(rng, *, can_cut):
    """The preemptions and the decodes that sampled nothing in a random history."""
    planner = Planner(
        num_blocks=rng.choice([14, 18]), host_slots=rng.choice([0, 20]),
        enable_reuse=rng.choice([True, False]), max_seq_len=60, max_input_len=50,
        max_num_batched_tokens=rng.choice([8, 32]), max_recompute_rows=rng.choice([8, 12]),
        enable_chunked_context=can_cut,
    )  # fmt: skip
    scheduler, in_flight, depth = planner.scheduler, deque(), rng.choice([1, 2])
    num_again = 0
    for number in range(250):
        if number < 150 and rng.random() < 0.6:
            longest = min(24, planner.config.max_num_batched_tokens)
            planner.add(rng.randrange(1, longest), max_tokens=rng.randrange(1, 30))
        scheduler.swap_ins.done_step = scheduler.step - rng.randrange(2)
        by_row = {}
        step = planner.plan()
        if step is not None:
            in_flight.append(step)
            by_row = {s.row: s for s in scheduler.running}
            for row, start, count, is_decode in entries_of(step):
                num_prompt = by_row[row].num_prompt_tokens
                assert is_decode == (start >= num_prompt)
                assert is_decode or start + count <= num_prompt
            num_again += step.decision.num_recomputed
        if in_flight and (step is None or len(in_flight) == depth):
            planner.answer(in_flight.popleft(), rng.randrange(1, 9))
    return scheduler.preemptions.num_sequences, num_again


def cached(planner, prompt, output=()):
    """Tokens that a sequence of this prompt and output finds in the cache, as it starts."""
    request = planner.add(prompt=list(prompt), output=output, max_tokens=len(output) + 1)
    planner.plan()
    return request.sequences[0].num_computed_before


OUTPUT = [500] * 9
"""Ids of the first request's output, of which the last one is not computed."""


CASES = {
    "the same prompt": (range(10), (), 9),
    "the same sequence": (range(10), OUTPUT[:8], 17),
    "one that goes on with the output": ([*range(10), *OUTPUT], (), 10),
    "one whose prompt ends in the output": ([*range(10), *OUTPUT[:4]], OUTPUT[:4], 10),
    "one whose output begins in the prompt": (range(9), [9, 500], 9),
    "one whose output begins a block before": (range(6), [6, 7, 8, 9], 4),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_prompts_share_no_token(case):
    prompt, output, num_cached = CASES[case]
    planner = Planner(max_recompute_rows=8)
    planner.add(prompt=list(range(10)), max_tokens=9)
    while planner.scheduler.has_requests:
        planner.step()

    # A partial block serves if half of the wanted tokens match.
    assert cached(planner, prompt, output) == num_cached


def test_prompts_reuse_outputs_where_kernels_round_alike():
    planner = Planner()
    planner.add(prompt=list(range(10)), max_tokens=9)
    while planner.scheduler.has_requests:
        planner.step()

    assert cached(planner, [*range(10), *OUTPUT]) == 18


NGRAM = SpeculationConfig(drafter="ngram", is_adaptive=False)


@pytest.mark.parametrize("speculation", [SpeculationConfig(), NGRAM], ids=["plain", "drafts"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_engine_that_computes_output_again_as_decodes_serves_the_same_tokens(
    depth, speculation
):
    def serve(max_tokens, **limits):
        driver = Driver(
            EngineConfig(
                model="test", engine_dir=str(MODEL), device="cpu", dtype="float32",
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=64, max_num_seqs=8, max_seq_len=128,
                    max_input_len=100, policy="max_utilization", expected_output_tokens=1,
                    **limits,
                ),
                cache=CacheConfig(tokens_per_block=8, max_tokens=max_tokens),
            )
        )  # fmt: skip
        rng = random.Random(5)
        requests = []
        for number in range(10):
            words = [rng.randrange(2, 4000) for _ in range(3)]
            prompt = [rng.choice(words) for _ in range(rng.randrange(1, 30))]
            fields = {"top_k": 1} if number % 2 else {"top_k": 20, "seed": number}
            fields |= {"no_repeat_ngram_size": 4} if number % 3 == 0 else {}
            output = [rng.choice(words) for _ in range(rng.choice([0, 0, 20]))]
            requests.append(driver.submit(prompt, output=output, max_tokens=60, **fields))
        driver.run()
        driver.check_idle()
        return [driver.output(each) for each in requests], driver.engine.scheduler

    expected, plain = serve(2048)
    assert plain.preemptions.num_sequences == 0
    found, scheduler = serve(256, max_recompute_rows=24, depth=depth, speculation=speculation)

    assert scheduler.preemptions.num_tokens
    assert found == expected


def test_blocks_with_output_have_hashes_of_their_own():
    planner = Planner(max_recompute_rows=8)
    ids = array("i", range(3 * BLOCK))
    hashes = [
        planner.add(prompt=ids[:count].tolist(), output=ids[count:], max_tokens=20)
        .sequences[0]
        .blocks.hashes
        for count in (3 * BLOCK, 2 * BLOCK, 2 * BLOCK - 1, BLOCK)
    ]

    firsts, seconds, thirds = zip(*hashes, strict=True)
    assert len(set(firsts)) == 1
    assert len(set(seconds)) == 3
    assert len(set(thirds)) == 4
