"""Engines whose KV cache has one byte a number: the tokens of the same engine without reuse."""

from __future__ import annotations

import logging
import shutil

import numpy as np
import pytest
import torch

from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from tests.unit.worker.models.models import load_ours
from trimaran.builder.quantization.kv_calibration import calibrate_kv_scales
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.kv_cache_dtype import KVScales

SCALES = KVScales(
    "int8",
    {0: ((0.02, 0.05), (0.03, 0.01)), 1: ((0.04,), (0.02, 0.03))},
)
"""Scales of the small model's layers: for each head, or one for both heads."""


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    """The small model with scales of its KV cache."""
    copy = tmp_path_factory.mktemp("scaled") / "model"
    shutil.copytree(model_folder, copy)
    SCALES.write(copy)
    return copy


@pytest.fixture(params=["fp8", "int8"])
def dtype(request):
    return request.param


def requests_of(prompt_of):
    """Prompts that share prefixes, of several blocks and partial ones."""
    shared = prompt_of(70, 9)
    return [shared[:count] + prompt_of(20, count) for count in (70, 50, 33)] + [prompt_of(100)]


def outputs_of(driver, prompts, **fields):
    return [outputs for (outputs,) in (driver.serve([each], [fields]) for each in prompts)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 23, "depth": 2},
        {"max_tokens": 208, "host_bytes": 1 << 20},
        {"max_tokens": 208, "host_bytes": 1 << 20, "attention_windows": (33,), "num_sinks": 4},
    ],
    ids=str,
)
def test_reuse_chunks_and_host_copies_give_the_tokens_of_an_engine_without_them(
    make_engine, prompt_of, folder, dtype, changes
):
    prompts = requests_of(prompt_of)
    windows = {key: changes[key] for key in changes.keys() & {"attention_windows", "num_sinks"}}
    plain = make_engine(folder=folder, dtype=dtype, enable_block_reuse=False, **windows)
    expected = outputs_of(plain, prompts, max_tokens=12)
    driver = make_engine(folder=folder, dtype=dtype, **changes)

    for _ in range(3):
        ids = [driver.submit(prompt, max_tokens=12) for prompt in prompts]
        driver.run()
        assert [[driver.output(number)] for number in ids] == expected
        driver.check_idle()

    cache = driver.engine.scheduler.cache
    assert cache.num_reused_blocks > 0
    if "host_bytes" in changes:
        assert cache.hosts[0].num_loaded > 0


def test_preempted_sequences_keep_their_tokens(make_engine, prompt_of, folder, dtype):
    prompts = [prompt_of(20 + seed, seed) for seed in range(6)]
    plain = make_engine(folder=folder, dtype=dtype, enable_block_reuse=False)
    expected = outputs_of(plain, prompts, max_tokens=90)
    driver = make_engine(folder=folder, dtype=dtype, max_tokens=208)

    assert driver.serve(prompts, [{"max_tokens": 90}]) == expected
    assert driver.engine.scheduler.preemptions.num_sequences > 0


def test_beams_and_sequences_copy_blocks_of_bytes(make_engine, prompt_of, folder, dtype):
    prompts = requests_of(prompt_of)
    fields = [
        {"beam_width": 3, "num_return_sequences": 3},
        {"top_k": 20, "seed": 4, "num_return_sequences": 3},
    ]
    plain = make_engine(folder=folder, dtype=dtype, enable_block_reuse=False, max_beam_width=3)
    expected = [plain.serve([prompt], [each])[0] for prompt in prompts for each in fields]
    driver = make_engine(folder=folder, dtype=dtype, max_beam_width=3, max_tokens=640)

    for _ in range(2):
        assert driver.serve(prompts, fields) == expected


def test_each_adapter_reuses_blocks_of_its_own(
    make_engine, prompt_of, folder, model_folder, dtype
):
    adapters = {task: on_the_wire(make_adapter(model_folder, seed=task)) for task in (5, 9)}
    prompts = requests_of(prompt_of)

    def outputs(driver, task, prompt):
        fields = {"adapter_id": task, "adapter": adapters.get(task)} if task else {}
        return driver.serve([prompt], [fields])[0]

    plain = make_engine(folder=folder, dtype=dtype, enable_block_reuse=False)
    driver = make_engine(folder=folder, dtype=dtype, max_num_batched_tokens=23)
    asked = [(task, prompt) for prompt in prompts for task in (0, 5, 9)]
    expected = [outputs(plain, *each) for each in asked]

    for _ in range(2):
        assert [outputs(driver, *each) for each in asked] == expected
    assert driver.engine.scheduler.cache.num_reused_blocks > 0


def test_the_cache_takes_a_byte_a_number_and_the_facts_name_its_dtype(
    make_engine, folder, dtype
):
    plain, driver = (
        make_engine(folder=folder, dtype=each, host_bytes=1 << 20) for each in ("auto", dtype)
    )
    facts = driver.engine.facts()
    assert facts["kv_cache_dtype"] == facts["backends"]["kv_cache"] == dtype
    assert plain.engine.facts()["kv_cache_dtype"] == "float32"
    sizes = [
        (each.engine.runner.groups[0].block_bytes(16), each.engine.scheduler.cache.hosts[0])
        for each in (plain, driver)
    ]
    assert sizes[0][0] == 4 * sizes[1][0]
    assert sizes[1][1].num_slots == 4 * sizes[0][1].num_slots


@torch.inference_mode()
def test_logits_with_calibrated_scales_are_near_those_of_an_exact_cache(
    make_engine, prompt_of, model_folder, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    prompt, logits = prompt_of(100), {}
    texts = [prompt_of(100, seed) for seed in range(4)]
    for dtype in ("auto", "fp8", "int8"):
        if dtype != "auto":
            model = load_ours(model_folder)
            calibrate_kv_scales(model, dtype, texts).write(folder)
        driver = make_engine(folder=folder, dtype=dtype)
        number = driver.submit(prompt, max_tokens=1, return_generation_logits=True)
        driver.run()
        logits[dtype] = np.frombuffer(driver.told(number, "generation_logits")[0], np.float32)
    exact = logits["auto"]
    for dtype, share in (("fp8", 0.15), ("int8", 0.1)):
        error = np.sqrt(np.mean((logits[dtype] - exact) ** 2))
        assert 0 < error < share * exact.std()


def test_missing_scales_are_said_loudly_for_fp8_and_refused_for_int8(
    make_engine, model_folder, caplog
):
    with caplog.at_level(logging.WARNING):
        make_engine(dtype="fp8")
    assert "KV CACHE WITHOUT SCALES" in caplog.text
    assert "--calib_dataset FILE" in caplog.text
    with pytest.raises(ConfigError, match=r"INT8 needs scales.*--int8_kv_cache"):
        make_engine(dtype="int8")


def test_a_dtype_of_other_floats_is_refused(make_engine):
    with pytest.raises(ConfigError, match="runs in float32, and its KV cache has the same"):
        make_engine(dtype="bfloat16")
