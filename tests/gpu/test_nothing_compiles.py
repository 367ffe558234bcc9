"""A GPU's engine compiles and loads no Triton kernel after its start, whatever requests ask."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from tests.driver import Driver
from tests.models.families import family_configs, one_of_each_family
from tests.unit.worker.engine.test_every_feature import MODEL, draw
from tests.unit.worker.execution.test_step_kernels import DrawnSteps
from tests.unit.worker.lora_adapters import LINEARS, make_adapter, on_the_wire
from tests.unit.worker.models import models
from trimaran.comm.deadlines import Watchdog
from trimaran.kernels.adapters import AdapterBlocks, AdapterTables, kernel_variants
from trimaran.kernels.triton.launch import Launcher
from trimaran.kernels.triton.lora import add_adapters, compile_adapters
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    SchedulerConfig,
)
from trimaran.worker.engine.compilations import Compilations

pytestmark = pytest.mark.gpu

LENGTHS = (1, 5, 28, 61)
SAMPLINGS = (
    {},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"top_k": 20, "seed": 3, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"no_repeat_ngram_size": 2, "return_log_probs": True},
    {"return_context_logits": True, "return_generation_logits": True},
    {"top_p": 0.9, "top_p_decay": 0.9, "top_p_reset_ids": 3},
    {"beam_width": 3, "num_return_sequences": 3, "end_id": 7},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.2},
)
ADAPTERS = {
    3: (3, tuple(LINEARS)),
    5: (20, ("attn_q", "attn_v")),
    7: (64, ("mlp_gate", "attn_dense")),
    9: (16, ("attn_k",)),
    11: (40, ("mlp_4h_to_h", "mlp_h_to_4h")),
}
"""Rank and modules of the adapter of each task."""


def triton_objects():
    """The kernels and launchers of all modules that are loaded."""
    for name, module in list(sys.modules.items()):
        if name.startswith("trimaran.kernels.triton"):
            yield from vars(module).values()


@pytest.fixture
def compiled(monkeypatch):
    """The kernels compiled or loaded since `begin`; those of earlier tests count as unknown."""
    for each in triton_objects():
        if isinstance(each, JITFunction):
            each.device_caches.clear()
        elif isinstance(each, Launcher):
            each._compiled.clear()
    names: list[str] = []

    def begin() -> list[str]:
        def note(*, metadata, **_) -> None:
            names.append(metadata["name"])

        monkeypatch.setattr(knobs.compilation, "listener", note)
        return names

    return begin


def make_driver(folder, **changes):
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=str(folder),
            device="cuda",
            dtype="bfloat16",
            scheduler=SchedulerConfig(
                max_num_batched_tokens=96,
                max_num_seqs=20,
                max_seq_len=128,
                max_input_len=127,
                max_beam_width=4,
                policy="max_utilization",
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=2048),
            **changes,
        )
    )


def serve_in_waves(driver, requests):
    """Prompts begin beside decodes, alone and many at once."""
    for number, fields in enumerate(requests):
        driver.submit(**fields)
        for _ in range((number * 7) % 4):
            driver.step()
    driver.run(max_steps=100_000)


@pytest.mark.parametrize("name", one_of_each_family())
def test_a_family_compiles_nothing_after_its_start(compiled, name, tmp_path):
    models.save_huggingface(tmp_path, family_configs()[name])
    driver = make_driver(tmp_path)
    names = compiled()

    rng = np.random.default_rng(3)
    requests = [
        {"prompt": rng.integers(0, 150, length), "max_tokens": 12, **sampling}
        for sampling in SAMPLINGS
        for length in LENGTHS
    ]
    serve_in_waves(driver, requests)

    driver.engine.shutdown()
    assert names == []


def test_drawn_steps_with_masks_of_guides_compile_nothing_after_the_start(compiled, tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    driver = make_driver(tmp_path)
    runner, names = driver.engine.runner, compiled()

    steps = DrawnSteps(7, runner.model.config.hidden_size)
    for _ in range(200):
        decision = steps.next()
        if len(decision.rows):
            runner.execute_model(decision).wait()

    driver.engine.shutdown()
    assert names == []


WAYS = {
    "graphs": {},
    "adapters in graphs": {"lora": LoraConfig(has_graphs=True)},
    "launches": {"cuda_graphs": False},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_every_feature_compiles_nothing_after_the_start(compiled, way):
    adapters = {
        task: on_the_wire(make_adapter(MODEL, task, rank, modules))
        for task, (rank, modules) in ADAPTERS.items()
    }
    driver = make_driver(MODEL, **WAYS[way])
    names = compiled()

    rng = random.Random(way)
    requests = []
    for _ in range(120):
        fields = draw(rng, adapters)
        # The masks of guides come from another package; drawn steps have masks.
        fields = {name: value for name, value in fields.items() if "guide" not in name}
        task = rng.choice([0, 0, *adapters])
        if task:
            fields.update(adapter_id=task, adapter=adapters[task])
        requests.append(fields)
    serve_in_waves(driver, requests)

    driver.engine.shutdown()
    assert names == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_adapters_compiled_ahead_are_those_that_steps_launch(compiled, dtype):
    variants = kernel_variants(64, has_large_blocks=True)
    for size, rank in variants:
        compile_adapters(torch.device("cuda", 0), dtype, size, rank)
    names = compiled()

    offsets = torch.zeros((4, 9, 3), dtype=torch.int64, device="cuda")
    tables = AdapterTables(torch.zeros(64, dtype=dtype, device="cuda"), offsets)
    for size, rank in variants:
        packed = torch.full((3, size), -1, dtype=torch.int32, device="cuda")
        blocks = AdapterBlocks(packed, packed[:, 0].contiguous(), rank)
        for first, sizes in ((0, (64, 32, 32)), (3, (64,)), (4, (96, 96))):
            x = torch.zeros((20, 64), dtype=dtype, device="cuda")
            output = torch.zeros((20, sum(sizes)), dtype=dtype, device="cuda")
            add_adapters(x, output, tables, blocks, first, sizes)

    assert names == []


@triton.jit
def _add_one_kernel(x, TILE: tl.constexpr):
    places = tl.arange(0, TILE)
    tl.store(x + places, tl.load(x + places) + 1)


def test_a_rank_that_compiles_is_not_hung(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.compilation, "listener", None)
    x = torch.zeros(1 << 14, device="cuda")
    _add_one_kernel[(1,)](x, TILE=128)
    barked, compilations = threading.Event(), Compilations()
    watchdog = Watchdog(0.3, barked.set)
    compilations.watch(watchdog, 60.0)
    sizes = [256 << bits for bits in range(7)]

    # Together the compilations take longer than the step may.
    watchdog.watch(lambda: "a step")
    for size in sizes:
        _add_one_kernel[(1,)](x, TILE=size)
    watchdog.pause()
    watchdog.stop()

    assert not barked.is_set()
    assert compilations.num_compiled == len(sizes)
