"""Steps with long prompts on a GPU, in Triton's interpreter, equal those on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.models import models
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.gpu import TritonOps
from trimaran.worker.execution import model_runner
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.input_batch import InputBatch
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.kv_cache.kv_group import group_layers
from trimaran.worker.layers.linear import QKVParallelLinear
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s

NUM_ROWS, MAX_LEN, BLOCK = 4, 96, 16
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=8).to_wire()


def make_runner(folder, inputs, ops):
    model = models.load_ours(folder, ops=ops)
    groups = group_layers(model.kv_cache_specs())
    for group in groups:
        group.allocate(NUM_ROWS * MAX_LEN // BLOCK, BLOCK, CPU)
        group.pool.fill_(float("nan"))
    return ModelRunner(model, groups, inputs, 150, SingleRankGroup(), depth=1)


@pytest.fixture
def runners(tmp_path):
    """A CPU's runner, which computes all queries, and a runner with a GPU's kernels."""
    models.save_huggingface(tmp_path, models.llama_config())
    sizes = NUM_ROWS, MAX_LEN
    cpu = make_runner(tmp_path, InputBatch(*sizes, BLOCK, 1, CPU, 1), None)
    inputs = DeviceInputs(*sizes, 200, BLOCK, CPU, depth=1)
    device = make_runner(tmp_path, inputs, TritonOps())
    device.end._sampling.device_state = DeviceSamplingState(NUM_ROWS, CPU)
    return cpu, device


def admit(row, ids):
    """A new row, and its blocks."""
    blocks = [(0, row, n, row * MAX_LEN // BLOCK + n) for n in range(MAX_LEN // BLOCK)]
    new = NewRow(
        row=row, token_ids=int32s(ids), num_prompt_tokens=len(ids), sampling=GREEDY
    )  # fmt: skip
    return new, blocks


def decide(entries, sampled, admitted=(), num_decodes=0):
    """A decision of (row, computed, chunk) entries."""
    rows, computed, chunks = zip(*entries, strict=True)
    return SchedulerOutput(
        step=1,
        rows=int32s(rows),
        num_scheduled_tokens=int32s(chunks),
        num_computed_tokens=int32s(computed),
        sampled=int32s(sampled),
        new_blocks=int32s([block for _, blocks in admitted for block in blocks], 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=[new for new, _ in admitted],
        num_decodes=num_decodes,
    )


STEPS = {
    "a prompt's first chunk, of which nobody samples": lambda first, second, third: [
        decide([(0, 0, 40)], [], [first]),
        decide([(0, 40, 17)], [0]),
    ],
    "prompts that end, one that does not, and a decode": lambda first, second, third: [
        decide([(0, 0, 57)], [0], [first]),
        decide([(0, 57, 1), (1, 0, 33), (2, 0, 30)], [0, 1], [second, third], 1),
        decide([(0, 58, 1), (1, 33, 1), (2, 30, 15)], [0, 1, 2], num_decodes=2),
    ],
}  # fmt: skip


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_last_layer_with_sampled_queries_alone_gives_the_tokens_and_caches_of_all_queries(
    runners, steps, monkeypatch
):
    monkeypatch.setattr(model_runner, "_MIN_SPARED", 8)
    num_narrow = 0
    keys_and_values = QKVParallelLinear.keys_and_values

    def count(layer, x_TD):
        nonlocal num_narrow
        num_narrow += 1
        return keys_and_values(layer, x_TD)

    monkeypatch.setattr(QKVParallelLinear, "keys_and_values", count)
    prompts = models.prompts(57, 33, 45)
    found = []
    for runner in runners:
        admitted = [admit(row, ids) for row, ids in enumerate(prompts)]
        outputs = [runner.execute_model(step).wait() for step in steps(*admitted)]
        found.append([list(output.token_ids) for output in outputs])

    assert found[0] == found[1]
    assert any(found[0])
    # Counted in the last layer of the runner with the kernels for GPUs.
    assert num_narrow > 0
    caches = [runner.groups[0].pool[:-1] for runner in runners]
    torch.testing.assert_close(*caches, atol=2e-5, rtol=1e-4, equal_nan=True)
