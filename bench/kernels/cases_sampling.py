"""Sampling from the vocabulary of an 8B Llama, by the rows' sampling parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.triton import logits as triton_logits
from trimaran.kernels.triton import sampling as triton_sampling
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.steps.step_types import NewRow, int32s

ROWS = (1, 64, 256, 1024)
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(top_p=1.0),
    "top-k 50, top-p 0.9": SamplingParams(top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(top_p=1.0, min_p=0.05),
}
_VOCAB = 128256
_SPREAD = 2.0
"""Standard deviation of the logits: thousands of ids hold the mass."""

_CACHE_BYTES = 200 << 20
"""Least total size of a case's logits: several times the largest L2."""


def cases(device: torch.device, dtype: torch.dtype) -> list[KernelCase]:
    """Draws of each kind, and log-probabilities, for one row to a full step."""
    made = []
    for rows in ROWS:
        num_copies = min(max(2, _CACHE_BYTES // (rows * _VOCAB * dtype.itemsize)), 64)
        sets = [
            torch.randn(rows, _VOCAB, device=device).mul_(_SPREAD).to(dtype)
            for _ in range(num_copies)
        ]
        made += [_draw(name, params, sets) for name, params in KINDS.items()]
        made.append(_log_probs(sets))
    return made


def _draw(name: str, params: SamplingParams, sets: list[Tensor]) -> KernelCase:
    logits = sets[0]
    count = len(logits)
    state = DeviceSamplingState(count, logits.device)
    for row in range(count):
        new = NewRow(row=row, token_ids=int32s([1]), num_prompt_tokens=1)
        state.enter(new, SamplingParams(**{**params.to_wire(), "seed": row}))
    words = state.tensor()
    rows = torch.arange(count, dtype=torch.int32, device=logits.device)
    lengths = torch.full_like(rows, 9)
    has_filters = params.top_k > 0 or 0 < params.top_p < 1 or params.min_p > 0

    def run(x: Tensor) -> Tensor:
        return triton_sampling.draw(x, rows, lengths, words, has_filters=has_filters)

    return _case(f"draw: {name}", run, _plain if params.top_p else _likeliest, sets)


def _log_probs(sets: list[Tensor]) -> KernelCase:
    ids = torch.from_numpy(np.arange(len(sets[0]))).to(sets[0].device)

    def peer(x: Tensor) -> Tensor:
        return x.float().log_softmax(dim=-1).gather(1, ids[:, None])

    return _case("log_probs", lambda x: triton_logits.log_probs(x, ids), peer, sets)


def _likeliest(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)


def _plain(x: Tensor) -> Tensor:
    """A draw from the softmax without any filter: the least work for torch."""
    return (x.float().softmax(dim=-1) / torch.empty_like(x).exponential_()).argmax(dim=-1)


def _case(
    name: str,
    run: Callable[[Tensor], Tensor],
    peer: Callable[[Tensor], Tensor],
    sets: list[Tensor],
) -> KernelCase:
    rows, vocab_size = sets[0].shape
    return KernelCase(
        name=name,
        shape=f"{rows} x {vocab_size}",
        dtype=str(sets[0].dtype).removeprefix("torch."),
        run=in_turn(run, sets),
        num_bytes=sets[0].nbytes,
        peer=in_turn(peer, sets),
    )
