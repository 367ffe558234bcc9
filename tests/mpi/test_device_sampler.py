"""GPUs with shards of the vocabulary sample the ids of one GPU with the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.sampling.device_sampler import DeviceSampler
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.sampling.sampling_rows import SamplingRows
from trimaran.worker.steps.step_types import NewRow, int32s

HAS_GPUS = torch.cuda.device_count() >= mpi.MPI.COMM_WORLD.Get_size()
"""A GPU for each rank where the host has as many, and Triton's interpreter elsewhere."""
VOCAB = 150
LENGTH = 9
PLAIN = [{}, {"top_p": 1.0}, {"top_p": 1.0, "temperature": 3.0}]
BEYOND = [
    {"top_k": 9},
    {"repetition_penalty": 1.4, "return_log_probs": True},
    {"beam_width": 2},
]


@pytest.mark.matrix(keep=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("fields", [PLAIN, PLAIN + BEYOND, BEYOND])
def test_rows_with_edits_and_plain_rows_are_sampled_together(world, fields):
    device = torch.device("cuda", world.rank) if HAS_GPUS else torch.device("cpu")
    if HAS_GPUS:
        torch.cuda.set_device(device)
    group = connect_group(world, device, 20.0)
    width = -(-VOCAB // world.size) + 2
    torch.manual_seed(3)
    whole = torch.randn(len(fields), VOCAB).to(device)
    table = torch.randint(0, VOCAB, (len(fields), LENGTH + 1), dtype=torch.int32).to(device)
    padded = torch.nn.functional.pad(whole, (0, width * world.size - VOCAB), value=99.0)
    mine = padded[:, world.rank * width : (world.rank + 1) * width]

    sampler = DeviceSampler(group)
    first_id = world.rank * width
    found = sampler.sample_shards(mine, first_id, make_batch(fields, device), table)

    alone = sampler.sample(whole, make_batch(fields, device), table)
    is_beam = torch.tensor(["beam_width" in each for each in fields])
    assert torch.equal(found.token_ids.cpu()[~is_beam], alone.token_ids.cpu()[~is_beam])
    assert (found.log_probs is None) == (alone.log_probs is None)
    for entry, each in enumerate(fields):
        if each.get("return_log_probs"):
            assert found.log_probs[entry] == alone.log_probs[entry]
    if alone.beams is not None:
        assert torch.equal(found.beams.token_ids, alone.beams.token_ids)
    group.close()


def make_batch(fields, device):
    """A step with a row for each request, in the form of a GPU's step."""
    rows = SamplingRows(len(fields), VOCAB, device)
    rows.device_state = DeviceSamplingState(len(fields), device)
    for row, each in enumerate(fields):
        params = SamplingParams(**each, seed=row)
        new = NewRow(
            row=row, token_ids=int32s([1] * 3), num_prompt_tokens=3, sampling=params.to_wire()
        )
        rows.enter(new)
    order, lengths = int32s(range(len(fields))), int32s([LENGTH] * len(fields))
    on_device = (torch.from_numpy(each).to(device) for each in (order, lengths))
    return rows.batch(order, lengths, *on_device)
