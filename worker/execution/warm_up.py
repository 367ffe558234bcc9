"""Synthetic steps before the first request, to warm up and to measure a step's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.execution.prompt_tables import PromptTable
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

_RESET = SamplingParams(top_p=0.9, top_p_decay=0.9, top_p_reset_ids=0, seed=1).to_wire()

_LOGITS = SamplingParams(
    top_p=1.0, seed=1, return_context_logits=True, return_generation_logits=True
).to_wire()

_SHORTEST = 4
"""Longest sequence from which steps have two tokens behind a cached token."""

_ROWS_APART, _TOKENS_APART = 8, 64
_MAX_TOKENS = 8192
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
    left: tuple[int, ...] = (),
) -> SchedulerOutput:
    """A step whose rows all use the first blocks; the written KV is never read.

    Rows with one token and cached tokens are decodes and come first; sequences of the rows
    ``left`` end before the step.
    """
    return SchedulerOutput(
        step=0,
        rows=int32s([new.row for new in rows]),
        num_scheduled_tokens=chunks,
        num_computed_tokens=computed,
        sampled=int32s(range(len(rows))),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(left),
        new_rows=rows if are_new else [],
        num_decodes=int(((chunks == 1) & (computed > 0)).sum()),
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
    """Run a prompt and a decode, so that the first request does not wait for lazy loading; on a
    GPU also steps that load the kernels of all later steps. Collective."""
    if runner.inputs.device.type == "cuda":
        load_step_kernels(runner, limits)
        run_features(runner, limits)
        return
    _run_sequence(runner, _row(0, _usual_length(runner, limits), _FILTERED))
    runner.end.leave(0)


def _usual_length(runner: ModelRunner, limits: SchedulerConfig) -> int:
    """Two blocks of tokens, or as many as a sequence and a step may have."""
    length = min(limits.max_seq_len - 1, limits.max_num_batched_tokens)
    return max(1, min(length, 2 * runner.inputs.block_size))


def run_features(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run a prompt and a decode with each feature of sampling and of prompts. Collective."""
    length = _usual_length(runner, limits)
    num_words = -(-runner.model.config.vocab_size // 32)
    for sampling in _samplings(limits):
        masks = int32s([-1] * num_words if sampling is _GUIDED else ())
        _run_sequence(runner, _row(0, length, sampling), masks)
    _run_sequence(runner, _row_with_table(runner, length))
    # The row keeps its table until its sequence leaves.
    _run_sequence(runner, _row(0, length, _PLAIN))
    runner.end.leave(0)


def _samplings(limits: SchedulerConfig) -> Iterator[dict[str, Any]]:
    """Requests whose sampling runs, together, all that a GPU's sampler may launch."""
    yield from (_FILTERED, _PLAIN, _GUIDED, _RESET, _LOGITS)
    if limits.max_beam_width > 1:
        beams = SamplingParams(beam_width=2, num_return_sequences=2, end_id=0)
        yield beams.to_wire()
        yield {**_EDITED, "top_p": 0.0, "beam_width": 2, "num_return_sequences": 2}


def _row_with_table(runner: ModelRunner, length: int) -> NewRow:
    """A prompt whose first token has an entry of a prompt table."""
    hidden = runner.model.config.hidden_size
    row = _row(0, length, _PLAIN)
    row.token_ids[0] = runner.model.config.vocab_size
    row.prompt_table = PromptTable("FP32", (1, hidden), bytes(4 * hidden)).to_wire()
    return row


def _run_sequence(runner: ModelRunner, row: NewRow, masks: Int32Array | None = None) -> None:
    """Run a sequence's prompt and a decode; the row's earlier sequence leaves."""
    length = len(row.token_ids)
    runner.run_alone(_step([row], int32s([0]), int32s([length]), masks, left=(row.row,)))
    runner.run_alone(_step([row], int32s([length]), int32s([1]), masks, are_new=False))


def load_step_kernels(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Run steps of every kind through few layers, so that no later step compiles a kernel.

    Kernels that are compiled for a number of sequences or tokens are compiled for powers of
    two. Steps hold decodes, prompts, prompts with cached tokens, or decodes beside prompts.
    Each kind runs without adapters, and with each variant of the adapters' kernels. Collective.
    """
    # A sequence with draft tokens has several rows in a step.
    rows = [_row(row % limits.max_num_seqs, 1, _PLAIN) for row in range(limits.max_num_rows)]
    ones = int32s([1] * len(rows))
    with runner.model.one_layer_per_shape():
        runner.run_alone(_step(rows, ones, ones))
        _run_all_kinds(runner, limits, rows)
        if limits.speculation.is_network:
            _run_drafts(runner, limits, rows)
        if runner.adapters is not None and runner.adapters.kernel_variants:
            first, *others = runner.adapters.kernel_variants
            with runner.adapters.unused_variant(first):
                _run_all_kinds(runner, limits, rows)
            # Numbers of sequences and sizes of adapters do not depend on each other.
            for variant in others:
                with runner.adapters.unused_variant(variant):
                    _run_kinds(runner, limits, rows, [min(2, len(rows))])
    for new in rows:
        runner.end.leave(new.row)


def _run_drafts(runner: ModelRunner, limits: SchedulerConfig, rows: list[NewRow]) -> None:
    """Run drafts of all numbers of sequences, for trees of all numbers of first nodes."""
    drafted = limits.speculation.drafted_counts
    for asked in drafted if limits.speculation.has_trees else drafted[-1:]:
        for count in _counts(limits.max_num_seqs):
            runner.run_alone(_step_with_drafts(limits, rows[:count], asked))


def _counts(most: int) -> list[int]:
    """All small numbers, the powers of two, and the largest number."""
    powers = [1 << bits for bits in range(most.bit_length())]
    return sorted({*range(1, min(8, most) + 1), *powers, most})


def _run_all_kinds(runner: ModelRunner, limits: SchedulerConfig, rows: list[NewRow]) -> None:
    """Run decodes and prompts of all numbers of sequences, and prompts of all numbers of
    tokens."""
    _run_kinds(runner, limits, rows, _counts(len(rows)))
    if limits.max_recompute_rows:
        for count in _counts(limits.max_recompute_rows):
            _run_recomputed(runner, limits, rows, count)
    for tokens in _counts(_most_prompt_tokens(limits)):
        _run_prompts(runner, limits, rows, tokens)


def _run_kinds(
    runner: ModelRunner, limits: SchedulerConfig, rows: list[NewRow], counts: list[int]
) -> None:
    """Run decodes and prompts of these numbers of sequences, which are in their rows."""
    for count in counts:
        ones = int32s([1] * count)
        runner.run_alone(_step(rows[:count], ones, ones, are_new=False))
        spare = limits.max_num_batched_tokens - count
        if count > limits.max_num_seqs or spare < 0:
            continue
        # A step may have room for prompts of one token alone.
        num_longer = min(count, spare) if limits.max_seq_len >= _SHORTEST else 0
        chunks = int32s([1] * (count - num_longer) + [2] * num_longer)
        runner.run_alone(_step(rows[:count], 0 * ones, chunks, are_new=False))
        if num_longer:
            runner.run_alone(_step(rows[:count], ones, chunks, are_new=False))
        if num_longer == count > 1:
            chunks[0] = 1
            runner.run_alone(_step(rows[:count], ones, chunks, are_new=False))


def _run_recomputed(
    runner: ModelRunner, limits: SchedulerConfig, rows: list[NewRow], count: int
) -> None:
    """Run so many decodes that compute known output, alone and beside a prompt."""
    runner.run_alone(_recomputing(rows, [1] * count))
    if count + 2 <= limits.max_num_batched_tokens and limits.max_seq_len >= _SHORTEST:
        runner.run_alone(_recomputing(rows, [1] * count + [2]))


def _recomputing(rows: list[NewRow], chunks: list[int]) -> SchedulerOutput:
    """A step that samples its last sequence alone."""
    entries = [rows[index % len(rows)] for index in range(len(chunks))]
    step = _step(entries, int32s([1] * len(chunks)), int32s(chunks), are_new=False)
    step.sampled = step.sampled[-1:]
    return step


def _asking(limits: SchedulerConfig, step: SchedulerOutput) -> SchedulerOutput:
    """The step; if a network drafts, all sequences that are sampled want the most drafts."""
    if limits.speculation.is_network:
        most = limits.speculation.max_draft_tokens
        count = min(len(step.sampled), limits.max_num_seqs)
        lengths = (step.num_computed_tokens + step.num_scheduled_tokens)[step.sampled]
        rows = [(row, 0, 0, int(lengths[row]), most) for row in range(count)]
        step.proposals = int32s(rows, 5)
    return step


def _longest_chunk(limits: SchedulerConfig) -> int:
    """Most tokens of a sequence in a step; resumed sequences have output too."""
    return max(1, limits.max_seq_len - 1)


def _most_prompt_tokens(limits: SchedulerConfig) -> int:
    """Most tokens of a step with prompts alone."""
    return min(limits.max_num_batched_tokens, limits.max_num_seqs * _longest_chunk(limits))


def _step_with_drafts(
    limits: SchedulerConfig, rows: list[NewRow], asked: int
) -> SchedulerOutput:
    """Decodes after which a network makes ``asked`` drafts for each sequence, the first with a
    draft that the step verifies, if it has room. No sequence has blocks for what is drafted."""
    count = len(rows)
    is_verified = count < limits.max_num_rows and limits.max_seq_len >= _SHORTEST
    entries = [*rows, *rows[:1]] if is_verified else rows
    computed = int32s([1] * count + [2] * is_verified)
    step = _step(entries, computed, int32s([1] * len(entries)), are_new=False)
    step.decode_ids = int32s([0] * is_verified)
    step.num_drafts = int(is_verified)
    step.proposals = int32s([(row, 0, 0, 2, asked) for row in range(count)], 5)
    if is_verified:
        step.proposals[0, 1:3] = count, 1
    if is_verified and limits.speculation.has_trees:
        step.tree_masks, step.tree_runs = int32s((-1, -1), 2), int32s((0, count, 1), 3)
    return step


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
            step = _step(rows[:count], ones[:count], ones[:count], are_new=False)
            runner.run_alone(_asking(limits, step))
        most = min(_most_prompt_tokens(limits), _MAX_TOKENS)
        for tokens in range(_TOKENS_APART, most + 1, _TOKENS_APART):
            _run_prompts(runner, limits, rows, tokens)
    for new in rows:
        runner.end.leave(new.row)


def _run_prompts(
    runner: ModelRunner, limits: SchedulerConfig, rows: list[NewRow], tokens: int
) -> None:
    """Run prompts of so many tokens together: short ones, if there are rows for so many."""
    count = min(-(-tokens // min(_CHUNK, _longest_chunk(limits))), limits.max_num_seqs)
    ends = np.linspace(0, tokens, count + 1).astype(int)
    chunks = int32s(np.diff(ends).tolist())
    zeros = int32s([0] * count)
    runner.run_alone(_step(rows[:count], zeros, chunks, are_new=False))


def peak_step_bytes(runner: ModelRunner, limits: SchedulerConfig) -> tuple[int, int]:
    """Device memory that the largest steps take temporarily: all prompts, and all decodes."""
    longest = min(limits.max_input_len, limits.max_num_batched_tokens, limits.max_seq_len - 1)
    num_full = min(limits.max_num_seqs, max(1, limits.max_num_batched_tokens // longest))
    prompts = [_row(row, longest, _EDITED) for row in range(num_full)]
    # With a cached token each: attention to cached tokens may take memory of its own.
    past = int32s([min(1, longest - 1)] * num_full)
    step = _asking(limits, _step(prompts, past, longest - past))
    prompt_bytes = _peak_bytes(runner, step)
    short = [_row(row % limits.max_num_seqs, 1, _EDITED) for row in range(limits.max_num_rows)]
    ones = int32s([1] * len(short))
    decode_bytes = _peak_bytes(runner, _asking(limits, _step(short, ones, ones)))
    if limits.max_recompute_rows:
        again = _recomputing(short, [1] * limits.max_recompute_rows)
        decode_bytes = max(decode_bytes, _peak_bytes(runner, again))
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
