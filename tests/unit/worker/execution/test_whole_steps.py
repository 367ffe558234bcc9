"""The end of a whole step in Triton's interpreter, and which steps graphs hold to their end."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.unit.worker.models import models
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.gpu import TritonOps
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.kv_cache.kv_group import group_layers
from trimaran.worker.sampling.device_sampler import DeviceSampler
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.steps.step_times import CpuMarks
from trimaran.worker.steps.step_types import DraftRule, NewRow, SchedulerOutput, int32s

CPU = torch.device("cpu")
VOCAB, NUM_ROWS, MAX_LEN, BLOCK = 150, 8, 64, 16
PLAIN = [{}, {"top_p": 1.0, "seed": 5, "temperature": 1.5}, {"top_p": 1.0, "seed": 6}]
FILTERED = [{}, {"top_k": 9, "seed": 5, "temperature": 1.5}, {"top_p": 0.7, "seed": 6}]


@pytest.fixture
def runner(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    model = models.load_ours(tmp_path, ops=TritonOps())
    groups = group_layers(model.kv_cache_specs())
    for group in groups:
        group.allocate(NUM_ROWS * MAX_LEN // BLOCK, BLOCK, CPU)
    inputs = DeviceInputs(NUM_ROWS, MAX_LEN, MAX_LEN, BLOCK, CPU, depth=2)
    inputs.use_spare_block(NUM_ROWS * MAX_LEN // BLOCK)
    tp = SingleRankGroup()
    runner = ModelRunner(model, groups, inputs, VOCAB, tp, depth=2)
    runner.end._sampling.device_state = DeviceSamplingState(NUM_ROWS, CPU)
    runner.end._sampler = DeviceSampler(tp)
    return runner


def step(count, computed, new_rows=(), sampled=None):
    is_decode = computed > 0
    return SchedulerOutput(
        step=1,
        rows=int32s(range(count)),
        num_scheduled_tokens=int32s([1 if is_decode else 4] * count),
        num_computed_tokens=int32s([computed] * count),
        sampled=int32s(range(count) if sampled is None else sampled),
        new_blocks=int32s([] if is_decode else [(0, row, 0, row) for row in range(count)], 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=list(new_rows),
        num_decodes=count if is_decode else 0,
    )


def enter(runner, samplings):
    """Run the prompts of rows with these samplings."""
    rows = [
        NewRow(
            row=row, token_ids=int32s([row + 3] * 4), num_prompt_tokens=4,
            sampling=SamplingParams(**fields).to_wire(),
        )
        for row, fields in enumerate(samplings)
    ]  # fmt: skip
    runner.execute_model(step(len(rows), 0, rows)).wait()


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("has_filters", [True, False])
def test_the_end_of_a_whole_step_stores_the_ids_of_a_step_sampled_apart(runner, has_filters):
    enter(runner, FILTERED if has_filters else PLAIN)
    decode = step(3, 4)
    expected = runner.execute_model(decode).wait().token_ids
    table = runner.inputs.token_table
    table[:, 5] = 0

    whole = runner.end.whole_steps()
    with torch.inference_mode():
        inputs = runner.inputs
        inputs.launch(decode, 4)
        hidden = runner._forward(inputs.views(4, 4, 4), 4)
        whole.launch_end(hidden, has_filters=has_filters)
    output = whole.output(3, CpuMarks())

    assert output.wait().token_ids == expected
    assert table[:3, 5].tolist() == expected
    assert not table[3:, 5].any()


class Replays:
    """Graphs that launch nothing."""

    def __init__(self, whole, monkeypatch):
        self.found = []
        whole.make_graphs([1, 2, 4, 10, 64, 96, 256, 300], None, None)
        for graphs in (whole._plain, whole._filtered):
            monkeypatch.setattr(graphs, "replay", partial(self._replay, graphs))
        self._whole = whole
        self.sizes = [whole._plain.sizes, whole._filtered.sizes]

    def _replay(self, graphs, size):
        self.found.append(("plain" if graphs is self._whole._plain else "filtered", size))

    def of(self, decision, most_tokens=0):
        """The kind and size of the graph that runs the step; None for none."""
        self.found.clear()
        with torch.inference_mode():
            output = self._whole.run(decision, most_tokens, CpuMarks())
        assert (output is None) == (not self.found)
        return self.found[0] if self.found else None


def test_graphs_serve_steps_of_rows_that_need_draws_alone(runner, monkeypatch):
    enter(runner, [*PLAIN, {"top_k": 3, "seed": 1}, {"repetition_penalty": 1.5}])
    whole = runner.end.whole_steps()
    assert whole.run(step(3, 4), 0, CpuMarks()) is None
    replays = Replays(whole, monkeypatch)

    assert replays.sizes == [[1, 2, 4, 10, 64, 96, 256], [1, 2, 4, 10, 64]]
    assert [replays.of(step(count, 4)) for count in (1, 2, 3)] == [
        ("plain", 1), ("plain", 2), ("plain", 4),
    ]  # fmt: skip
    assert replays.of(step(4, 4)) == ("filtered", 4)
    assert replays.of(step(5, 4)) is None
    # The size must hold the largest step of all dp ranks.
    assert replays.of(step(1, 4), 5) == ("plain", 10)
    assert replays.of(step(4, 4), 65) is None
    # A step that computes known output does not sample all rows.
    assert replays.of(step(3, 4, sampled=[1, 2])) is None
    drafted = step(3, 4)
    drafted.draft_rules = [DraftRule(sampled_rows=int32s([0]), token_ids=int32s([1]))]
    assert replays.of(drafted) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"return_log_probs": True},
        {"return_generation_logits": True},
        {"beam_width": 2, "num_return_sequences": 2},
        {"no_repeat_ngram_size": 2},
        {"top_p": 0.9, "top_p_decay": 0.9, "top_p_reset_ids": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_graph_holds_a_step_with_a_row_that_needs_more_than_a_draw(
    runner, monkeypatch, fields
):
    enter(runner, PLAIN)
    replays = Replays(runner.end.whole_steps(), monkeypatch)
    assert replays.of(step(3, 4)) is not None
    sampling = SamplingParams(**fields).to_wire()
    new = NewRow(row=1, token_ids=int32s([3]), num_prompt_tokens=1, sampling=sampling)
    runner.end.enter(new)

    assert replays.of(step(3, 4)) is None
    assert replays.of(step(1, 4)) is not None
    runner.end.leave(1)
    assert replays.of(step(3, 4)) is not None
