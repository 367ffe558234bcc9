"""Layers for multi-token prediction draft as a loop in transformers, and change no output."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.worker.speculation.head_reference import generate
from tests.unit.worker.speculation.mtp_reference import MtpReference, write_deepseek
from tests.unit.worker.speculation.test_exactness import WAYS, check, draw, serve
from tests.unit.worker.speculation.test_networks import count_with, make_engine
from trimaran.worker.config.speculation_config import SpeculationConfig

COUNT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small DeepSeek V3 with the layer."""
    return write_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def told(folder):
    """Prompts, and outputs of 16 tokens with the counts of the loop in transformers."""
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[place * 7 % 150 for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 9)]
    head = MtpReference(folder)
    return prompts, [generate(target, head, prompt, 16, COUNT) for prompt in prompts]


def mtp(folder, **fields):
    """The drafter, whose layer is in the target's folder."""
    values = {"max_draft_tokens": COUNT, "is_adaptive": False, **fields}
    return SpeculationConfig(drafter="mtp", draft_dir=str(folder), **values)


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 16}, {"tokens_per_block": 4, "max_tokens": 160}],
)
def test_the_layer_drafts_as_the_loop_in_transformers_does(folder, told, changes):
    prompts, expected = told

    driver = make_engine(folder, mtp(folder), **changes)
    outputs, counts = count_with(driver, prompts, 16)

    assert outputs == [ids for ids, _ in expected]
    assert counts.num_drafts == sum(each.drafts for _, each in expected)
    assert counts.num_accepted == sum(each.accepted for _, each in expected)
    assert 0 < counts.num_accepted < counts.num_tokens


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "a window"])
def test_drafts_of_the_layer_change_no_output(folder, way):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(folder, SpeculationConfig(), **WAYS[way]), asked)

    driver = make_engine(folder, mtp(folder), **WAYS[way])
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens
