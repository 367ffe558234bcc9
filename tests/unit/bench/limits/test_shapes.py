"""Well-known shapes: sizes as published, limits that count windows, routers and cut layers."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimaran.bench.limits.latent_shape import shape_of
from trimaran.bench.limits.roofline import (
    Ceilings,
    StepTokens,
    decode_step_s,
    prompt_s,
    resident_sequences,
)
from trimaran.bench.limits.shapes import SHAPES, pretrained_config, shape_config
from trimaran.comm.errors import ConfigError

H200 = Ceilings(flops=680e12, bandwidth=4.3e12, memory=0.9 * 150e9)
PARAMETERS = {
    "llama1b": 1_235_814_400, "llama8b": 8_030_261_248, "llama70b": 70_553_706_496,
    "mixtral": 46_702_792_704, "qwen3_30b": 30_532_122_624, "qwen25_7b": 7_615_616_512,
    "gemma2_9b": 9_241_705_984, "phi3_mini": 3_821_079_552, "deepseek_lite": 15_706_484_224,
}  # fmt: skip
"""As published with the models."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_exactly_the_parameters_of_transformers_model(name):
    with torch.device("meta"):
        config = AutoConfig.for_model(**shape_config(name, "bfloat16", 4096))
        theirs = AutoModelForCausalLM.from_config(config)

    shape = shape_of(pretrained_config(name))

    count = sum(each.numel() for each in theirs.parameters())
    assert shape.weight_bytes == 2 * count
    assert PARAMETERS.get(name, count) == count


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("tiny")])
def test_one_sequence_reads_every_weight_that_its_token_needs(name):
    shape = shape_of(pretrained_config(name))
    idle = shape.expert_bytes * (1 - shape.chosen / shape.experts)
    embedding = 0 if shape.is_tied else 2 * shape.vocab * shape.hidden
    read = shape.weight_bytes - idle - embedding

    assert decode_step_s(shape, H200, 1, 1) == pytest.approx(read / H200.bandwidth, rel=0.01)


def test_layers_with_a_window_read_and_keep_no_more_than_the_window():
    shape = shape_of(pretrained_config("gemma2_9b"))
    whole = dataclasses.replace(shape, windows=())
    assert shape.windows.count(4096) == 21

    assert decode_step_s(shape, H200, 8, 4095) == decode_step_s(whole, H200, 8, 4095)
    more = [decode_step_s(one, H200, 8, 65536) for one in (whole, shape)]
    unread = 8 * (65536 - 4095) * shape.kv_token_bytes / 2
    assert more[0] - more[1] == pytest.approx(unread / H200.bandwidth, rel=1e-6)
    assert prompt_s(shape, H200, 32768) < prompt_s(whole, H200, 32768)
    kept = [resident_sequences(one, H200, 40960, 2, 10**6) for one in (whole, shape)]
    assert kept[1] == pytest.approx(kept[0] * 2 / 1.1, abs=1)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 8, 20])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 9), (5, 0), (5, 4), (12, 2)])
def test_queries_see_the_keys_that_a_mask_leaves_them(window, new, past):
    query, key = torch.arange(past, past + new)[:, None], torch.arange(past + new)
    seen = key <= query
    if window:
        seen &= key > query - window
    step = StepTokens(3, new, past)

    assert step.pairs(window) == 3 * int(seen.sum())
    assert step.count == 3 * new
    assert new > 1 or step.read(window) == 3 * int(seen[:, :past].sum())


def test_a_batch_reads_the_experts_that_its_tokens_choose():
    shape = shape_of(pretrained_config("qwen3_30b_16l"))
    common = shape.weight_bytes - shape.expert_bytes - 2 * shape.vocab * shape.hidden
    generator = torch.Generator().manual_seed(0)
    for batch in (4, 16, 64):
        scores = torch.rand((200, batch, shape.experts), generator=generator)
        chosen = scores.topk(shape.chosen).indices.flatten(1)
        touched = sum(len(each.unique()) for each in chosen) / len(chosen)
        read = common + shape.expert_bytes * touched / shape.experts
        step = decode_step_s(shape, H200, batch, 1)
        assert step == pytest.approx(read / H200.bandwidth, rel=0.02)


def test_a_shape_is_cut_to_its_first_layers():
    cut = pretrained_config("qwen3_30b", layers=16)
    assert cut == pretrained_config("qwen3_30b_16l")
    assert pretrained_config("gemma2_9b", layers=2).layer_windows == (4096, 0)
    with pytest.raises(ConfigError, match="--layers 43 is above the 42 layers of gemma2_9b"):
        shape_config("gemma2_9b", "bfloat16", 4096, 43)
