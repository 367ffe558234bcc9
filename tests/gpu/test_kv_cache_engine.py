"""Engines with a quantized KV cache on a GPU: the tokens of the same engine without reuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.driver import Driver
from tests.gpu.hidden_waits import no_hidden_waits
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from tests.unit.worker.models.models import load_ours
from trimaran.builder.quantization.kv_calibration import calibrate_kv_scales
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig

pytestmark = pytest.mark.gpu

DEVICE, VOCAB = "cuda", 150
SHARED = np.random.default_rng(9).integers(0, VOCAB, 70).tolist()
PROMPTS = [
    SHARED[:count] + np.random.default_rng(count).integers(0, VOCAB, 20).tolist()
    for count in (0, 33, 50, 70)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3},
    {"beam_width": 3, "num_return_sequences": 3},
)


@pytest.fixture(scope="module")
def scaled(folder, tmp_path_factory):
    """The small model with calibrated scales, of INT8: they serve FP8 too."""
    copy = tmp_path_factory.mktemp("scaled") / "model"
    shutil.copytree(folder, copy)
    calibrate_kv_scales(load_ours(Path(folder)), "int8", PROMPTS).write(copy)
    return str(copy)


@pytest.fixture(params=["fp8", "int8"])
def kind(request):
    return request.param


def make_driver(folder, kind, *, dtype="bfloat16", max_num_batched_tokens=256, **cache):
    scheduler = SchedulerConfig(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        max_seq_len=128,
        max_input_len=127,
        max_beam_width=3,
        policy="max_utilization",
        depth=2,
    )
    values = {"tokens_per_block": 16, "max_tokens": 1024, **cache}
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device=DEVICE,
            dtype=dtype,
            # Products of float32 are those of the library.
            deterministic=dtype != "float32",
            scheduler=scheduler,
            cache=CacheConfig(dtype=kind, **values),
        )
    )


def alone(driver, prompts, samplings, **fields):
    """The outputs of each prompt under each sampling, one request at a time."""
    asked = [(prompt, {**each, **fields}) for prompt in prompts for each in samplings]
    return [driver.serve([prompt], [each])[0] for prompt, each in asked]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 23},
        {"max_tokens": 240, "host_bytes": 1 << 20},
        {"attention_windows": (33,), "num_sinks": 4},
    ],
    ids=str,
)
def test_reuse_chunks_and_host_copies_give_the_tokens_of_an_engine_without_them(
    scaled, kind, changes
):
    windows = {key: changes[key] for key in changes.keys() & {"attention_windows", "num_sinks"}}
    plain = make_driver(scaled, kind, enable_block_reuse=False, **windows)
    expected = alone(plain, PROMPTS, SAMPLINGS)
    driver = make_driver(scaled, kind, **changes)

    assert driver.engine.facts()["kv_cache_dtype"] == kind
    for _ in range(2):
        assert driver.serve(PROMPTS, SAMPLINGS) == expected
    assert driver.engine.scheduler.cache.num_reused_blocks > 0
    if "host_bytes" in changes:
        assert driver.engine.scheduler.cache.hosts[0].num_loaded > 0


def test_each_adapter_reuses_blocks_of_its_own(scaled, folder, kind):
    adapters = {task: on_the_wire(make_adapter(folder, seed=task)) for task in (5, 9)}
    plain = make_driver(scaled, kind, enable_block_reuse=False)
    driver = make_driver(scaled, kind, max_num_batched_tokens=23)
    for _ in range(2):
        for task, adapter in adapters.items():
            fields = {"adapter_id": task, "adapter": adapter}
            assert alone(driver, PROMPTS, ({},), **fields) == alone(
                plain, PROMPTS, ({},), **fields
            )


def test_greedy_tokens_in_float32_are_those_of_the_cpu(scaled, kind):
    on_gpu = make_driver(scaled, kind, dtype="float32").serve(PROMPTS, ({},))
    cpu = Driver(
        EngineConfig(
            model="test",
            engine_dir=scaled,
            device="cpu",
            dtype="float32",
            scheduler=SchedulerConfig(max_num_seqs=8, max_seq_len=128, max_input_len=127),
            cache=CacheConfig(tokens_per_block=16, max_tokens=1024, dtype=kind),
        )
    )
    on_cpu = cpu.serve(PROMPTS, ({},))
    # A number on the edge between two stored numbers may round to either: one output of four
    # may part.
    assert sum(ours == theirs for ours, theirs in zip(on_gpu, on_cpu, strict=True)) >= 3


def test_a_step_makes_no_hidden_synchronization_with_the_device(scaled, kind):
    driver = make_driver(scaled, kind)
    driver.serve(PROMPTS, SAMPLINGS)

    with no_hidden_waits():
        driver.serve(PROMPTS, SAMPLINGS)
