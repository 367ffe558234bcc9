"""Warm-up launches every variant of a Triton kernel that a later step may launch.

Triton's interpreter compiles nothing, so the properties that Triton compiles for are computed
here, from the same arguments.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.unit.worker.models import models
from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.adapters import kernel_variants
from trimaran.kernels.attention import AttentionMetadata
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.triton import inputs as input_kernels
from trimaran.kernels.triton.attention.work_items import plan_work
from trimaran.worker.config.engine_config import SchedulerConfig
from trimaran.worker.execution.device_inputs import DeviceInputs
from trimaran.worker.execution.model_runner import ModelRunner
from trimaran.worker.execution.prompt_tables import PromptTable
from trimaran.worker.execution.warm_up import load_step_kernels, run_features
from trimaran.worker.kv_cache.kv_group import group_layers
from trimaran.worker.layers.methods import AdapterState
from trimaran.worker.lora.device_slots import DeviceSlots
from trimaran.worker.sampling.device_sampler import DeviceSampler
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput, int32s

CPU = torch.device("cpu")
VOCAB = 150
NUM_ROWS, MAX_LEN, BLOCK, MAX_TOKENS = 20, 96, 16, 64
LIMITS = SchedulerConfig(
    max_num_seqs=NUM_ROWS,
    max_seq_len=MAX_LEN,
    max_input_len=MAX_LEN - 1,
    max_num_batched_tokens=MAX_TOKENS,
    max_beam_width=3,
)
SAMPLINGS = (
    {},
    {"top_p": 1.0},
    {"top_p": 0.9, "top_k": 20},
    {"top_p": 0.9, "top_p_decay": 0.8, "top_p_reset_ids": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    {"top_p": 0.8, "presence_penalty": 0.2, "min_tokens": 4, "end_id": 3},
    {"no_repeat_ngram_size": 3, "bad_words": ((3, 4, 5), (6,))},
    {"beam_width": 3, "num_return_sequences": 3, "end_id": 3},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.1},
    {"return_log_probs": True, "top_p": 0.7},
    {"return_context_logits": True, "return_generation_logits": True},
    {"guide_type": "json", "guide": "{}"},
    {"embedding_bias": np.zeros(VOCAB, "<f4").tobytes()},
)


def variant(kernel: InterpretedFunction, args, options):
    """What Triton compiles a kernel for: types, constants, and the numbers' divisibility."""
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    plain = set(kernel.kwargs["do_not_specialize"] or ())
    constants = {name for name, of in kernel.fn.__annotations__.items() if "constexpr" in of}
    found = [kernel.__name__]
    for name, value in named.items():
        if name in constants or name not in kernel.arg_names:
            found.append((name, str(value)))
        elif isinstance(value, torch.Tensor):
            is_aligned = name in plain or value.data_ptr() % 16 == 0
            found.append((name, value.dtype, is_aligned))
        elif isinstance(value, int):
            kind = None if name in plain else (value == 1, value % 16 == 0)
            found.append((name, kind, abs(value) < 1 << 31))
        else:
            found.append((name, type(value)))
    return tuple(found)


@pytest.fixture
def launched(monkeypatch):
    """The variants launched so far. Only the kernels of a step's inputs run: later code reads
    their results."""
    variants = set()
    run = InterpretedFunction.run

    def record(self, *args, grid, warmup, **options):
        variants.add(variant(self, args, options))
        if self.fn.__module__ == input_kernels.__name__:
            run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    # Ids that no kernel writes must still be ids.
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return variants


CONFIGS = {
    "llama": models.llama_config(),
    "gpt2": models.gpt2_config(),
    "gemma2": models.dense_configs()["gemma2"],
    **models.expert_configs(),
    **models.latent_configs(),
}


def make_runner(folder, name, limits=LIMITS):
    """A runner with a GPU's inputs, operators and sampler."""
    models.save_huggingface(folder, CONFIGS[name])
    model = models.load_ours(folder, ops=TritonOps())
    num_rows, longest = limits.max_num_seqs, limits.max_seq_len
    groups = group_layers(model.kv_cache_specs())
    for group in groups:
        group.allocate(num_rows * -(-longest // BLOCK), BLOCK, CPU)
    most_tokens = limits.max_num_batched_tokens
    inputs = DeviceInputs(num_rows, longest, most_tokens, BLOCK, CPU, depth=1)
    tp = SingleRankGroup()
    runner = ModelRunner(model, groups, inputs, VOCAB, tp, depth=1)
    runner.end._sampling.device_state = DeviceSamplingState(num_rows, CPU)
    runner.end._sampler = DeviceSampler(tp)
    return runner


@pytest.fixture(params=list(CONFIGS))
def runner(request, tmp_path):
    return make_runner(tmp_path, request.param)


class DrawnSteps:
    """Steps of drawn sequences, each with a prompt in chunks, then decodes. Some sequences have
    output, up to ``most_known`` tokens, which they compute again as decodes."""

    def __init__(self, seed: int, hidden_size: int, most_known: int = 0) -> None:
        self.rng = random.Random(seed)
        self.hidden_size = hidden_size
        self.most_known = most_known
        self.sequences: dict[int, list] = {}
        """By row: computed tokens, prompt tokens, sampling, known tokens."""

    def next(self) -> SchedulerOutput:
        """A step in which some sequences end and some begin."""
        rng = self.rng
        left = [row for row in self.sequences if rng.random() < 0.15]
        for row in left:
            del self.sequences[row]
        entered = [self._entered(row) for row in self._free()]
        entries, budget = [], MAX_TOKENS
        for row, each in self.sequences.items():
            computed, prompt, _, known = each
            missing = prompt - computed if computed < prompt else max(1, known - computed)
            chunk = min(missing, rng.randrange(1, 30), budget)
            if chunk and rng.random() < 0.9:
                budget -= chunk
                if computed < prompt:
                    entries.append((True, row, computed, chunk))
                else:
                    entries += [(False, row, computed + n, 1) for n in range(chunk)]
                each[0] += chunk
        entries.sort()
        return self._step(entries, left, entered)

    def _free(self) -> list[int]:
        """Rows of new sequences; now and then many at once."""
        free = [row for row in range(NUM_ROWS) if row not in self.sequences]
        return free[: self.rng.choice((0, 1, 2, len(free)))]

    def _entered(self, row: int) -> NewRow:
        length = self.rng.randrange(1, 40)
        fields = self.rng.choice(SAMPLINGS)
        known = length + self.rng.choice((0, self.rng.randrange(self.most_known + 1)))
        self.sequences[row] = [0, length, fields, known]
        ids = int32s([5] * known)
        table = None
        if self.rng.random() < 0.1:
            ids[-1] = VOCAB
            table = PromptTable("FP16", (1, self.hidden_size), bytes(2 * self.hidden_size))
            table = table.to_wire()
        sampling = SamplingParams(seed=row, **fields).to_wire()
        return NewRow(
            row=row, token_ids=ids, num_prompt_tokens=length, sampling=sampling,
            prompt_table=table,
        )  # fmt: skip

    def _step(self, entries, left, entered) -> SchedulerOutput:
        sampled, num_guided = [], 0
        for index, (_, row, computed, chunk) in enumerate(entries):
            if computed + chunk >= self.sequences[row][3]:
                sampled.append(index)
                num_guided += "guide" in self.sequences[row][2]
        return SchedulerOutput(
            step=1,
            rows=int32s([row for _, row, _, _ in entries]),
            num_scheduled_tokens=int32s([chunk for *_, chunk in entries]),
            num_computed_tokens=int32s([computed for _, _, computed, _ in entries]),
            sampled=int32s(sampled),
            new_blocks=int32s((), 4),
            block_copies=int32s((), 3),
            finished_rows=int32s(left),
            new_rows=entered,
            num_decodes=sum(not is_prompt for is_prompt, *_ in entries),
            masks=int32s([-1] * (num_guided * -(-VOCAB // 32))),
        )


@pytest.mark.matrix(keep=1)
def test_drawn_steps_launch_no_kernel_that_warm_up_has_not_launched(runner, launched):
    load_step_kernels(runner, LIMITS)
    run_features(runner, LIMITS)
    warm = set(launched)
    launched.clear()

    steps = DrawnSteps(7, runner.model.config.hidden_size)
    for _ in range(60):
        decision = steps.next()
        if len(decision.rows):
            runner.execute_model(decision)

    assert len(launched) > 10
    assert launched - warm == set()


@pytest.mark.matrix(keep=1)
def test_output_that_is_computed_again_launches_no_kernel_that_warm_up_has_not_launched(
    runner, launched
):
    limits = replace(LIMITS, max_recompute_rows=MAX_TOKENS)
    runner.recomputes_rows = True
    load_step_kernels(runner, limits)
    run_features(runner, limits)
    warm = set(launched)
    launched.clear()

    steps = DrawnSteps(7, runner.model.config.hidden_size, most_known=40)
    num_again = 0
    for _ in range(60):
        decision = steps.next()
        if len(decision.rows):
            num_again += decision.num_recomputed
            runner.execute_model(decision)

    assert num_again > 100
    assert launched - warm == set()


def test_warm_up_runs_a_layer_of_each_window(tmp_path):
    model = make_runner(tmp_path, "gemma2").model

    def windows():
        return {layer.attention.backend.spec.window for _, layer in model._stack}

    with model.one_layer_per_shape():
        warm = windows()
    assert len(warm) == 2
    assert warm == windows()


def prompts(lengths) -> SchedulerOutput:
    """A step of whole prompts."""
    rows = [
        NewRow(
            row=row, token_ids=int32s([5] * length), num_prompt_tokens=length,
            sampling=SamplingParams(top_p=1.0).to_wire(),
        )
        for row, length in enumerate(lengths)
    ]  # fmt: skip
    return SchedulerOutput(
        step=1,
        rows=int32s(range(len(rows))),
        num_scheduled_tokens=int32s(lengths),
        num_computed_tokens=int32s([0] * len(rows)),
        sampled=int32s(range(len(rows))),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=rows,
    )


AT_LIMITS = {
    # More prompts than the step has tokens for two each.
    "prompts of a token or two": ("llama", (20, 24, 96), [1] * 17),
    "prompts of a token": ("llama", (20, 20, 96), [1] * 20),
    # Experts are sorted by several programs.
    "one long prompt": ("mixtral", (1, 1024, 1100), [900]),
}
"""A model, the most sequences and tokens of a step, the longest sequence, and a step."""


@pytest.fixture(params=list(AT_LIMITS))
def at_limits(request, tmp_path):
    """A runner, its limits, and the lengths of a step's prompts."""
    name, (num_seqs, num_tokens, longest), lengths = AT_LIMITS[request.param]
    limits = SchedulerConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_seq_len=longest,
        max_input_len=longest - 1,
    )  # fmt: skip
    return make_runner(tmp_path, name, limits), limits, lengths


@pytest.mark.matrix(keep=1)
def test_steps_at_the_limits_launch_no_kernel_that_warm_up_has_not_launched(
    at_limits, launched
):
    runner, limits, lengths = at_limits
    load_step_kernels(runner, limits)
    run_features(runner, limits)
    warm = set(launched)
    launched.clear()

    runner.execute_model(prompts(lengths))

    assert len(launched) > 5
    assert launched - warm == set()


@pytest.mark.parametrize("is_fixed", [False, True])
def test_plans_of_decodes_have_a_variant_that_warm_up_runs(launched, is_fixed):
    def plan(count):
        metadata = AttentionMetadata(
            query_start_loc=torch.arange(count + 1, dtype=torch.int32),
            seq_lens=torch.ones(count, dtype=torch.int32),
            block_tables=torch.zeros((count, 4), dtype=torch.int32),
            slot_mapping=torch.zeros(count, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=64,
            num_decodes=count,
            rows=torch.arange(count, dtype=torch.int32),
        )
        plan_work(metadata, (8, 2, 128), count, 264, 32, is_fixed=is_fixed)

    for count in (*range(1, 9), 16, 32, 64, 100):
        plan(count)
    warm = set(launched)
    for count in range(1, 101):
        plan(count)

    assert len(warm) == 4
    assert launched == warm


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("max_rank", [1, 16, 24, 64, 100])
def test_blocks_of_adapters_have_a_variant_that_warm_up_runs(max_rank, is_deterministic):
    state, rng = AdapterState(), np.random.default_rng(max_rank)
    slots = DeviceSlots(
        _NoTargets(), state, torch.zeros(8), NUM_ROWS, max_rank,
        num_rows=NUM_ROWS, is_deterministic=is_deterministic,
    )  # fmt: skip
    expected = kernel_variants(max_rank, has_large_blocks=not is_deterministic)
    assert list(slots.kernel_variants) == expected
    found = set()
    for _ in range(200):
        slots._ranks[:] = rng.integers(1, max_rank + 1, NUM_ROWS)
        tokens = rng.integers(-1, rng.integers(1, NUM_ROWS), rng.integers(1, 200))
        if (tokens < 0).all():
            continue
        slots.begin(tokens.astype(np.int32), 0)
        padded = max(16, 1 << (slots._blocks.max_rank - 1).bit_length())
        found.add((slots._blocks.tokens.shape[1], padded))

    assert found <= set(expected)
    assert max(rank for _, rank in found) == max(rank for _, rank in expected)


class _NoTargets:
    """A layout of a model without layers that take adapters."""

    targets = ()
