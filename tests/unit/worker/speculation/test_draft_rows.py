"""Draft rows take what a step leaves, keep to a sequence's blocks, and are counted."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tests.unit.worker.conftest import VOCAB
from trimaran.worker.config.speculation_config import SpeculationConfig

ASKED = SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6)
NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=5, is_adaptive=False)
PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("max_num_seqs", "most", "num_rows"),
    [(1, 5, 6), (64, 5, 384), (256, 5, 512), (1024, 5, 1024), (32, 63, 1024)],
)
def test_steps_have_rows_for_the_drafts_of_many_sequences(max_num_seqs, most, num_rows):
    config = SpeculationConfig(drafter="ngram", max_draft_tokens=most)

    assert config.num_rows(max_num_seqs, 8192) == num_rows
    assert config.num_rows(max_num_seqs, 500) == min(500, num_rows)
    assert SpeculationConfig().num_rows(max_num_seqs, 8192) == max_num_seqs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("budget", "num_drafts"), [(8, 5), (5, 4)])
def test_drafts_without_room_in_a_step_wait_for_the_next_one(
    make_engine, depth, budget, num_drafts
):
    driver = make_engine(
        depth=depth, speculation=ASKED, max_num_batched_tokens=budget, max_num_seqs=2,
        enable_block_reuse=False,
    )  # fmt: skip
    ((plain,),) = driver.serve([PROMPT])
    request = driver.submit(PROMPT, max_tokens=12, draft_token_ids=tuple(plain[:6]))

    driver.run()

    counts = driver.engine.scheduler.draft_counts
    assert driver.output(request) == plain
    # Each step adds one id of the model's own behind the accepted drafts, or behind the prompt.
    assert (counts.num_tokens, counts.num_accepted) == (num_drafts, num_drafts)


@pytest.mark.parametrize("depth", [1, 2])
def test_generated_tokens_of_iterations_are_those_with_accepted_drafts(make_engine, depth):
    driver = make_engine(depth=depth, speculation=ASKED)
    ((plain,),) = driver.serve([PROMPT])
    driver.submit(PROMPT, max_tokens=12, draft_token_ids=(*plain[:3], (plain[3] + 1) % VOCAB))
    seen = []
    for _ in range(2):
        driver.step()
        seen.append(driver.engine.stats()["total_generation_tokens"])
    driver.run()

    # Three drafts beside the prompt, whose own token is none of a generation, and one decode.
    assert sum(seen) == 4


def test_drafts_behind_an_end_do_not_count_as_accepted(make_engine):
    driver = make_engine(speculation=ASKED)
    ((plain,),) = driver.serve([PROMPT])
    request = driver.submit(
        PROMPT, max_tokens=12, stop_words=((plain[2],),), draft_token_ids=tuple(plain[:6]),
        return_perf_metrics=True,
    )  # fmt: skip

    driver.run()

    num_output = plain.index(plain[2]) + 1
    assert driver.output(request) == plain[:num_output]
    figures = driver.extras[request, 0][-1]["figures"]
    assert figures["total_draft_tokens"] == 6
    assert figures["total_accepted_draft_tokens"] == num_output
    assert driver.engine.scheduler.draft_counts.num_accepted == num_output


class WrongDrafts:
    """Always proposes as many equal ids as it may."""

    is_asked = is_spent = False

    def propose(self, sequence, most):
        return array("i", [8] * most)


@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
def test_a_sequence_with_drafts_holds_the_blocks_of_its_window_alone(make_engine, policy):
    driver = make_engine(
        policy=policy, speculation=NGRAM, enable_block_reuse=False, attention_windows=(9,),
        tokens_per_block=4, max_num_batched_tokens=8, max_tokens=64, max_num_seqs=2,
    )  # fmt: skip
    scheduler = driver.engine.scheduler
    scheduler.draft_rows.make_drafter = lambda _: WrongDrafts()
    bias = np.zeros(VOCAB, "<f4")
    bias[7] = 1000.0
    request = driver.submit(PROMPT, max_tokens=110, embedding_bias=bias.tobytes())
    held = []
    while driver.engine.has_work:
        driver.step()
        held += [sequence.blocks.num_held for sequence in scheduler.running]

    assert driver.output(request) == [7] * 110
    assert scheduler.draft_counts.num_tokens > 110
    assert max(held) <= scheduler.cache.max_held(115, 8)
    driver.check_idle()
