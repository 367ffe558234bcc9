"""Synthetic steps before the first request, to warm up and to measure a step's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.steps.step_types import Int32Array, NewRow, SchedulerOutput, int32s

_FILTERED = SamplingParams(top_p=0.9, seed=1).to_wire()
"""Samples from unprocessed logits; a CPU sorts the whole vocabulary for it."""

_PLAIN = SamplingParams(top_p=1.0, seed=1).to_wire()
"""Several GPUs sample this without gathering logits."""

_EDITED = SamplingParams(
    top_p=0.9,
    seed=1,
    repetition_penalty=1.1,
    min_tokens=2,
    end_id=0,
    no_repeat_ngram_size=2,
    bad_words=((0, 0),),
    return_log_probs=True,
).to_wire()
"""Runs every other sampling kernel except those of guides, and takes the most memory."""

_GUIDED = {**_EDITED, "guide_type": "json", "guide": "{}"}
"""The same with a guide; its mask allows all ids."""


_ROWS_APART, _TOKENS_APART = 8, 64
_MOST_TOKENS = 8192
"""Largest step that is run. For an 8B Llama, the step of 7,168 tokens was the last to load a
kernel for products; larger steps take time to run."""

_CHUNK = 256
"""Tokens of a prompt in these steps; short, because attention is not measured."""


def _step(
    rows: list[NewRow],
    computed: Int32Array,
    chunks: Int32Array,
    masks: Int32Array | None = None,
    *,
    are_new: bool = True,
) -> SchedulerOutput:
    """A step whose rows all use the first blocks; the written KV is never read."""
    return SchedulerOutput(
        step=0,
        rows=int32s([new.row for new in rows]),
        num_scheduled_tokens=chunks,
        num_computed_tokens=computed,
        sampled=int32s(range(len(rows))),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=rows if are_new else [],
        num_decodes=len(rows) if bool((chunks == 1).all()) else 0,
        masks=int32s(()) if masks is None else masks,
    )


def _row(row: int, length: int, sampling: dict[str, Any]) -> NewRow:
    return NewRow(
        row=row,
        token_ids=int32s([0] * length),
        num_prompt_tokens=length,
        sampling=sampling,
    )


def run_small_steps(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run a prompt and a decode, so that the first request does not wait for lazy loading."""
    length = min(limits.max_seq_len - 1, limits.max_num_batched_tokens)
    length = max(1, min(length, 2 * runner.inputs.block_size))
    is_gpu = runner.inputs.device.type == "cuda"
    samplings = [_FILTERED, _GUIDED] if is_gpu else [_FILTERED]
    if is_gpu and runner.tp.size > 1:
        samplings.append(_PLAIN)
    num_words = -(-runner.model.config.vocab_size // 32)
    for sampling in samplings:
        rows = [_row(0, length, sampling)]
        masks = int32s([-1] * num_words if sampling is _GUIDED else ())
        runner.run_alone(_step(rows, int32s([0]), int32s([length]), masks))
        runner.run_alone(_step(rows, int32s([length]), int32s([1]), masks))
    runner.end.leave(0)


def load_product_kernels(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run steps of all sizes, through few layers, so that later steps load no kernels.

    Torch's library has different kernels for different numbers of rows, and loads a kernel at
    its first use, after waiting for the GPU's launched work. For an 8B Llama more than a
    hundred steps would begin late. Sizes are multiples of 8 for sequences, and of 64 for
    tokens. Collective.
    """
    # A sequence with draft tokens has several rows in a step.
    rows = [_row(row % limits.max_num_seqs, 1, _PLAIN) for row in range(limits.max_num_rows)]
    with runner.model.one_layer_per_shape():
        ones = int32s([1] * len(rows))
        runner.run_alone(_step(rows, ones, ones))
        for count in range(_ROWS_APART, len(rows), _ROWS_APART):
            runner.run_alone(_step(rows[:count], ones[:count], ones[:count], are_new=False))
        most = min(limits.max_num_batched_tokens, _MOST_TOKENS)
        for tokens in range(_TOKENS_APART, most + 1, _TOKENS_APART):
            count = -(-tokens // min(_CHUNK, limits.max_input_len, limits.max_seq_len - 1))
            if count > limits.max_num_seqs:
                break
            ends = np.linspace(0, tokens, count + 1).astype(int)
            chunks = int32s(np.diff(ends).tolist())
            zeros = int32s([0] * count)
            runner.run_alone(_step(rows[:count], zeros, chunks, are_new=False))
    for new in rows:
        runner.end.leave(new.row)


def peak_step_bytes(runner: ModelRunner, limits: SchedulerConfig) -> tuple[int, int]:
    """Device memory that the largest steps take temporarily: all prompts, and all decodes."""
    longest = min(limits.max_input_len, limits.max_num_batched_tokens, limits.max_seq_len - 1)
    num_full = min(limits.max_num_seqs, max(1, limits.max_num_batched_tokens // longest))
    prompts = [_row(row, longest, _EDITED) for row in range(num_full)]
    # With a cached token each: attention to cached tokens may take memory of its own.
    past = int32s([min(1, longest - 1)] * num_full)
    prompt_bytes = _peak_bytes(runner, _step(prompts, past, longest - past))
    short = [_row(row % limits.max_num_seqs, 1, _EDITED) for row in range(limits.max_num_rows)]
    ones = int32s([1] * len(short))
    decode_bytes = _peak_bytes(runner, _step(short, ones, ones))
    for new in short:
        runner.end.leave(new.row)
    return prompt_bytes, decode_bytes


def _peak_bytes(runner: ModelRunner, step: SchedulerOutput) -> int:
    device = runner.inputs.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run_alone(step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
