"""How far the top-p of a row has decayed, where an id of the output makes it whole again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.kernels import sampling_state
from trimaran.worker.sampling.sampling_rows import (
    RESET,
    TOP_P,
    TOP_P_DECAY,
    TOP_P_MIN,
    SamplingBatch,
    Want,
)

# Shapes: N rows of the batch, n of them with a reset id, R rows, L longest sequence.


def decay_steps(batch: SamplingBatch, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """On the CPU: output ids of each row since its reset id came, or since the prompt."""
    steps = batch.num_outputs(entries)
    if batch.token_table is None:
        return steps
    table = batch.token_table.numpy()
    resets = batch.wants[entries] & np.uint32(Want.RESET)
    for place in np.flatnonzero(resets):
        row, length = int(batch.rows[entries[place]]), int(batch.lengths[entries[place]])
        output = table[row, int(batch.state.num_prompt[row]) : length]
        found = np.flatnonzero(output == batch.state.int_params[row, RESET])
        if len(found):
            steps[place] = len(output) - 1 - found[-1]
    return steps


def with_resets(
    params_RW: Tensor,
    batch: SamplingBatch,
    rows_N: Tensor,
    lengths_N: Tensor,
    token_table_RL: Tensor,
) -> Tensor:
    """On a GPU: the rows' state with the top-p of this step where an id can reset it.

    Launched for steps with such rows alone; the host waits for nothing.
    """
    entries = batch.rows_wanting(Want.RESET)
    index = batch.index(entries)
    rows, lengths = rows_N[index].long(), lengths_N[index][:, None]
    floats, resets = batch.floats(entries), batch.ints(entries)[:, RESET, None]
    longest = int(batch.lengths[entries].max())
    places = torch.arange(longest, device=params_RW.device)
    prompts = params_RW[rows, sampling_state.NUM_PROMPT][:, None]
    tokens = token_table_RL[:, :longest].index_select(0, rows)
    is_reset = (tokens == resets) & (places >= prompts) & (places < lengths)
    # Where the last of them ends; the prompt's end if there is none.
    starts = torch.where(is_reset, places + 1, prompts).amax(dim=1, keepdim=True)
    steps = (lengths - starts)[:, 0]
    decayed = floats[:, TOP_P] * floats[:, TOP_P_DECAY] ** steps
    top_p = torch.where(steps > 0, decayed.maximum(floats[:, TOP_P_MIN]), floats[:, TOP_P])
    params = params_RW.clone()
    params[rows, sampling_state.TOP_P] = top_p.float().view(torch.int32)
    params[rows, sampling_state.TOP_P_DECAY] = torch.ones_like(top_p).view(torch.int32)
    return params
