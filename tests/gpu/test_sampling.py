"""Sampling kernels on a GPU: the CPU's ids, drawn without a wait, also from a CUDA graph."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.triton import sampling as triton_sampling
from trimaran.worker.sampling.sampler import HostSampler, make_sampler
from trimaran.worker.sampling.sampling_rows import RowFeature, SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
HOST = HostSampler(SingleRankGroup())
DEVICE = make_sampler(CUDA, SingleRankGroup())
LENGTH = 40

SAMPLINGS = [
    {},
    {"top_p": 1.0},
    {"top_p": 1.0, "temperature": 0.3},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"top_k": 5000, "top_p": 0.9},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 1.0, "min_p": 0.05},
    {"top_p": 0.95, "top_p_decay": 0.9, "top_p_min": 0.3},
    {"temperature": 0.0, "top_k": 50},
]
EDITS = [
    {"repetition_penalty": 1.3},
    {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"no_repeat_ngram_size": 2, "top_k": 30},
    {"bad_words": ((5,), (1, 2)), "min_tokens": 100, "end_id": 7},
    {"return_log_probs": True},
]


def make_batch(params, vocab_size, device):
    rows = SamplingRows(len(params), vocab_size, device)
    for row, each in enumerate(params):
        rows.enter(
            NewRow(
                row=row,
                token_ids=int32s([1] * 3),
                num_prompt_tokens=3,
                sampling=each.to_wire(),
            )
        )
    order = int32s(np.arange(len(params))[::-1])
    lengths = int32s([LENGTH] * len(params))
    if device.type == "cpu":
        return rows.batch(order, lengths)
    return rows.batch(
        order, lengths, torch.from_numpy(order).cuda(), torch.from_numpy(lengths).cuda()
    )


def make_all(fields, vocab_size, scale, dtype=torch.float32):
    """Batches for the CPU and the GPU, logits, and a table of ids that repeat."""
    torch.manual_seed(vocab_size)
    params = [SamplingParams(**each, seed=seed) for each in fields for seed in range(4)]
    logits = (torch.randn(len(params), vocab_size, device=CUDA) * scale).to(dtype)
    table = torch.randint(0, 200, (len(params), LENGTH + 5), dtype=torch.int32)
    batches = (make_batch(params, vocab_size, device) for device in (CPU, CUDA))
    return *batches, logits, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [151, 32000, 128256])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_ids_are_those_of_the_cpu(vocab_size, scale, dtype):
    on_cpu, on_gpu, logits, table = make_all(SAMPLINGS, vocab_size, scale, dtype)

    ids = DEVICE.sample(logits, on_gpu, table.cuda()).token_ids

    expected = HOST.sample(logits.float().cpu(), on_cpu, table).token_ids
    assert ids.cpu().tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [300, 128256])
def test_edited_logits_give_the_ids_and_log_probs_of_the_cpu(vocab_size):
    on_cpu, on_gpu, logits, table = make_all(EDITS, vocab_size, 2.0)

    sampled = DEVICE.sample(logits, on_gpu, table.cuda())

    expected = HOST.sample(logits.cpu(), on_cpu, table)
    assert sampled.token_ids.cpu().tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(sampled.log_probs.cpu(), expected.log_probs)


GUIDE = {"guide_type": "json", "guide": "{}"}


def masks_of(batch, vocab_size):
    """Each guided row allows a different half of all ids."""
    rng = np.random.default_rng(len(batch.rows))
    shape = len(batch.rows_wanting(RowFeature.GUIDE)), -(-vocab_size // 32)
    return torch.from_numpy(rng.integers(-(2**31), 2**31, shape, dtype=np.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [300, 128256])
@pytest.mark.parametrize(
    "guided", [[GUIDE], [{**GUIDE, "top_p": 1.0, "frequency_penalty": 1.0}]]
)
def test_guided_rows_beside_free_rows_have_the_ids_of_the_cpu(vocab_size, dtype, guided):
    fields = SAMPLINGS[:3] * 6 + guided * 2 + SAMPLINGS * 3 + guided
    on_cpu, on_gpu, logits, table = make_all(fields, vocab_size, 2.0, dtype)
    on_cpu.masks = masks_of(on_cpu, vocab_size)
    on_gpu.masks = on_cpu.masks.cuda()

    ids = DEVICE.sample(logits, on_gpu, table.cuda()).token_ids

    expected = HOST.sample(logits.float().cpu(), on_cpu, table).token_ids
    assert ids.cpu().tolist() == expected.tolist()


def test_sampling_causes_no_synchronization_with_the_device():
    fields = SAMPLINGS + EDITS + [GUIDE]
    _, batch, logits, table = make_all(fields, 32000, 2.0, torch.bfloat16)
    batch.masks = masks_of(batch, 32000).cuda()
    table = table.cuda()
    DEVICE.sample(logits, batch, table)

    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        DEVICE.sample(logits, batch, table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_draws_for_the_lengths_at_its_replay():
    _, batch, logits, _ = make_all(SAMPLINGS, 32000, 1.0, torch.bfloat16)
    state = batch.state.device_state.tensor()

    def draw():
        return triton_sampling.draw(
            logits, batch.device_rows, batch.device_lengths, state, has_filters=True
        )

    draw()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = draw()
    for _ in range(3):
        batch.device_lengths += 1
        graph.replay()
        assert torch.equal(captured, draw())
