"""LongRoPE by each sequence's own length, as in transformers, in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.worker.models import models
from trimaran.comm.errors import RequestError
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s

SWITCH_AT = 32
LENGTHS = (1, 10, 31, 32, 33, 60)
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=[models.longrope_config, models.two_rotations_config])
def checkpoint(request, tmp_path_factory):
    """A model stretched from 32 positions to 128, and the same model in transformers."""
    folder = tmp_path_factory.mktemp("longrope")
    return folder, models.save_huggingface(folder, request.param())


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Prompts shorter and longer than the switch, and transformers' continuations over it."""
    prompts = models.prompts(*LENGTHS)
    return prompts, models.reference_greedy(checkpoint[1], prompts, NUM_TOKENS)


@pytest.fixture
def model_folder(checkpoint):
    return checkpoint[0]


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth": 2},
        {"policy": "guaranteed_no_evict", "depth": 2},
        {"policy": "static_batch"},
        {"enable_block_reuse": False},
        # The few blocks cause preemption.
        {"max_tokens": 160, "max_num_batched_tokens": 20},
    ],
    ids=str,
)
def test_sequences_beyond_the_short_factors_continue_as_in_transformers(
    make_engine, expected, changes
):
    driver = make_engine(tokens_per_block=4, **changes)
    prompts, outputs = expected

    for _ in range(2):
        asked = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
        driver.run()
        assert [driver.output(number) for number in asked] == outputs
    driver.check_idle()


def test_blocks_of_sequences_with_short_factors_are_no_prefix_for_long_factors(
    make_engine, checkpoint
):
    driver = make_engine(tokens_per_block=4)
    (prompt,) = models.prompts(50)
    for length in (24, 50, 30, 50):
        asked = driver.submit(prompt[:length], max_tokens=2)
        driver.run()
        assert [driver.output(asked)] == models.reference_greedy(
            checkpoint[1], [prompt[:length]], 2
        )
    # The second prompt of 50 found the first one's blocks.
    assert driver.engine.scheduler.cache.num_reused_blocks >= 12 + 6


def test_sequences_of_one_prompt_switch_to_long_factors_independently(make_engine):
    fields = {"num_return_sequences": 3, "temperature": 1.5, "top_p": 1.0, "seed": 4}
    (prompt,) = models.prompts(29)
    outputs = []
    for depth in (1, 2):
        driver = make_engine(tokens_per_block=4, depth=depth)
        asked = driver.submit(prompt, max_tokens=20, **fields)
        driver.run()
        driver.check_idle()
        outputs.append([driver.output(asked, index) for index in range(3)])
    assert outputs[0] == outputs[1]
    assert len(set(map(tuple, outputs[0]))) == 3


def test_beam_searches_beyond_the_short_factors_are_refused(make_engine):
    driver = make_engine(max_beam_width=2)
    (prompt,) = models.prompts(30)
    with pytest.raises(RequestError, match=r"outgrows the 32 tokens.*max_tokens to 3,"):
        driver.submit(prompt, max_tokens=10, beam_width=2)
    for length, max_tokens in ((30, 3), (33, 10)):
        driver.submit(models.prompts(length)[0], max_tokens=max_tokens, beam_width=2)
    driver.run()
    driver.check_idle()


def test_an_engine_limited_to_short_contexts_never_switches_factors(make_engine):
    driver = make_engine(max_seq_len=SWITCH_AT, max_input_len=SWITCH_AT - 1)
    assert driver.engine.runner.model.switch_at == 0


def test_positions_on_a_gpu_are_shifted_as_on_the_cpu():
    cpu = torch.device("cpu")
    batches = (
        InputBatch(4, 64, 16, 1, cpu, 1, None, SWITCH_AT),
        DeviceInputs(4, 64, 64, 16, cpu, 1, SWITCH_AT),
    )
    rows = [
        NewRow(row=row, token_ids=int32s(np.arange(count)), num_prompt_tokens=count)
        for row, count in ((2, 40), (0, 5))
    ]
    decision = SchedulerOutput(
        step=1,
        rows=int32s([2, 0]),
        num_scheduled_tokens=int32s([8, 5]),
        num_computed_tokens=int32s([32, 0]),
        sampled=int32s([0, 1]),
        new_blocks=int32s([[0, row, i, 4 * row + i] for row in (0, 2) for i in range(3)]),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=rows,
    )  # fmt: skip

    inputs = [batch.prepare(decision) for batch in batches]

    shifted = [*range(SWITCH_AT + 32, SWITCH_AT + 40), *range(5)]
    for each in inputs:
        assert each.positions.tolist() == shifted
        assert each.seq_lens.tolist() == [40, 5]
    assert inputs[0].slot_mappings[0].tolist() == inputs[1].slot_mappings[0].tolist()
