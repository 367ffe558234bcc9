"""The limit of a machine: closed forms that hold at the extremes, and known sizes."""

import dataclasses

import pytest

from trimaran.bench.limits.latent_shape import shape_of
from trimaran.bench.limits.roofline import (
    Ceilings,
    ModelShape,
    decode_step_s,
    output_tokens_per_s,
    prompt_s,
    resident_sequences,
)
from trimaran.bench.limits.shapes import pretrained_config, shape_config
from trimaran.bench.offline.throughput import rank_weight_bytes
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.config.pretrained_config import PretrainedConfig

SHAPE = ModelShape.of(pretrained_config("llama8b"))
H200 = Ceilings(flops=680e12, bandwidth=4.3e12, memory=0.95 * 141e9)


def test_the_8b_shape_has_its_known_sizes():
    assert SHAPE.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert SHAPE.kv_token_bytes == 131072


def test_one_sequence_reads_all_weights_but_the_embedding():
    read = SHAPE.weight_bytes - 2 * SHAPE.vocab * SHAPE.hidden
    assert decode_step_s(SHAPE, H200, 1, 128) == pytest.approx(read / H200.bandwidth, rel=0.01)


def test_a_huge_batch_is_bound_by_arithmetic():
    weights = SHAPE.weight_bytes / 2 - SHAPE.vocab * SHAPE.hidden
    expected = 2 * 65536 * weights / H200.flops
    assert decode_step_s(SHAPE, H200, 65536, 1) == pytest.approx(expected, rel=0.03)


def test_twice_the_bandwidth_halves_a_bandwidth_bound_step():
    faster = dataclasses.replace(H200, bandwidth=2 * H200.bandwidth)
    slow, fast = (decode_step_s(SHAPE, each, 1, 1000) for each in (H200, faster))
    assert slow == pytest.approx(2 * fast)


def test_long_prompts_cost_more_a_token_and_share_the_weights():
    short, long = (prompt_s(SHAPE, H200, length) / length for length in (128, 32768))
    assert short < long < 2 * short


def test_memory_bounds_the_resident_sequences_and_the_token_rate():
    assert resident_sequences(SHAPE, H200, 1000, 1000, 768) == 584
    assert resident_sequences(SHAPE, H200, 128, 128, 1024) == 1024
    less = dataclasses.replace(H200, memory=40e9)
    rates = [output_tokens_per_s(SHAPE, each, 1000, 1000, 768) for each in (less, H200)]
    assert rates[0] < rates[1]


def test_a_cache_of_one_byte_a_number_holds_and_reads_twice_as_many_tokens():
    half = dataclasses.replace(SHAPE, cached_bytes=1.0)
    assert SHAPE.kv_token_bytes == 2 * half.kv_token_bytes
    assert resident_sequences(half, H200, 1000, 1000, 2000) == 2 * resident_sequences(
        SHAPE, H200, 1000, 1000, 1000
    )
    few, many = (decode_step_s(each, H200, 256, 8000) for each in (half, SHAPE))
    cached = SHAPE.kv_token_bytes * 256 * 8001 / H200.bandwidth
    assert many - few == pytest.approx(cached / 2, rel=1e-3)


def test_every_device_reserves_memory_for_its_workspace():
    two = dataclasses.replace(H200, memory=2 * H200.memory, devices=2)
    tokens = [
        (at.memory - at.devices * 3e9 - SHAPE.weight_bytes) / SHAPE.kv_token_bytes
        for at in (H200, two)
    ]
    assert [resident_sequences(SHAPE, at, 1, 1998, 10**6) for at in (H200, two)] == [
        int(count / 1000) for count in tokens
    ]


def test_dp_ranks_hold_copies_of_all_weights_but_divided_experts():
    shape = shape_of(pretrained_config("mixtral"))
    alone, dp_ranks, shared = (
        rank_weight_bytes(shape, parallel)
        for parallel in (
            ParallelConfig(),
            ParallelConfig(dp_size=2),
            ParallelConfig(dp_size=2, moe_tp_size=1, moe_ep_size=2),
        )
    )
    assert alone == dp_ranks == shape.weight_bytes
    assert shared == pytest.approx(shape.weight_bytes - shape.expert_bytes / 2)
    assert rank_weight_bytes(SHAPE, ParallelConfig(tp_size=2)) == SHAPE.weight_bytes / 2


@pytest.mark.parametrize(
    ("isl", "osl", "most", "limit"),
    [
        (128, 128, 1024, 20590),
        (2048, 128, 768, 2339),
        (128, 256, 1, 286),
        (128, 256, 256, 24835),
    ],
)
def test_limits_of_the_8b_shape_on_one_h200(isl, osl, most, limit):
    assert output_tokens_per_s(SHAPE, H200, isl, osl, most) == pytest.approx(limit, rel=2e-3)


@pytest.mark.parametrize(
    ("isl", "osl", "most", "limit"),
    [
        (128, 128, 1024, 12433),
        (1000, 1000, 192, 5046),
        (2048, 128, 192, 1204),
        (128, 256, 1, 169),
    ],
)
def test_limits_of_a_mixture_of_experts_on_one_h200(isl, osl, most, limit):
    shape = ModelShape.of(pretrained_config("mixtral"))
    assert shape.weight_bytes == pytest.approx(93.4e9, rel=1e-3)
    assert output_tokens_per_s(shape, H200, isl, osl, most) == pytest.approx(limit, rel=5e-3)


_LITE = shape_config("deepseek_lite", "bfloat16", 4096)
_V3 = {
    **_LITE, "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "q_lora_rank": 1536, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "cache_bytes"),
    [(_LITE, 15.7e9, 31104), (_V3, 671e9, 70272)],
    ids=["V2 Lite", "V3"],
)
def test_shapes_with_latent_attention_have_their_known_sizes(config, parameters, cache_bytes):
    shape = shape_of(PretrainedConfig.from_huggingface(config, "a shape"))
    assert shape.weight_bytes == pytest.approx(2 * parameters, rel=2e-3)
    assert shape.kv_token_bytes == cache_bytes
    mixed = shape.layers - shape.dense_layers
    experts = 3 * shape.hidden * shape.inner * shape.experts
    assert shape.expert_bytes == 2 * mixed * experts
    assert shape.mlp_width == config["num_experts_per_tok"] * shape.inner + shape.shared


def test_a_large_batch_of_latent_attention_reads_its_cache_and_all_experts():
    shape = shape_of(pretrained_config("deepseek_lite"))
    read = shape.weight_bytes - 2 * shape.vocab * shape.hidden
    read += 256 * 2048 * shape.kv_token_bytes

    assert decode_step_s(shape, H200, 256, 2048) == pytest.approx(
        read / H200.bandwidth, rel=0.05
    )
    assert prompt_s(shape, H200, 8192) > 2 * prompt_s(shape, H200, 4096)


_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257,
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "dtype": "bfloat16",
}  # fmt: skip
_PHI = {
    "architectures": ["PhiForCausalLM"], "model_type": "phi", "vocab_size": 51200,
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip
_QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (_GPT2, 124e6, 124e6),
        (_PHI, 2.78e9, 2.78e9),
        (_QWEN3_MOE, 30.5e9, 3.3e9),
        (_QWEN2_MOE, 14.3e9, 2.7e9),
    ],
    ids=["GPT-2", "Phi 2", "Qwen3 30B A3B", "Qwen1.5 MoE A2.7B"],
)
def test_weight_counts_of_every_family_equal_those_of_an_engine(config, parameters, active):
    read = PretrainedConfig.from_huggingface(config, "a folder")
    built = PretrainedConfig.from_dict(read.to_dict(), "an engine folder")

    shape = shape_of(read)

    assert shape_of(built) == shape
    assert shape.weight_bytes == pytest.approx(2 * parameters, rel=0.01)
    idle = shape.expert_bytes * (1 - shape.chosen / shape.experts)
    assert shape.weight_bytes - idle == pytest.approx(2 * active, rel=0.03)
    # One sequence reads what its token needs, of the embedding a row.
    embedding = 0 if shape.is_tied else 2 * shape.vocab * shape.hidden
    least = (shape.weight_bytes - idle - embedding) / H200.bandwidth
    assert decode_step_s(shape, H200, 1, 1) == pytest.approx(least, rel=0.02)


def test_quantized_weights_have_their_bytes_and_rates():
    fp8 = dataclasses.replace(SHAPE, quantized_bytes=1.0, cached_bytes=1.0)
    twice = dataclasses.replace(H200, quantized_flops=2 * H200.flops)
    embedding = 2 * SHAPE.vocab * SHAPE.hidden
    assert fp8.weight_bytes == pytest.approx(SHAPE.weight_bytes / 2 + embedding, rel=1e-3)
    # Products in FP8 of a huge batch take half the time, the head's the same.
    head = 2 * 65536 * SHAPE.vocab * SHAPE.hidden / H200.flops
    whole, half = (decode_step_s(SHAPE, H200, 65536, 1), decode_step_s(fp8, twice, 65536, 1))
    assert half - head == pytest.approx((whole - head) / 2, rel=0.03)
    # Without a rate of their own quantized products have that of the others.
    assert decode_step_s(fp8, H200, 65536, 1) == pytest.approx(whole, rel=0.03)


def test_a_quantized_head_is_read_in_its_bytes():
    shape = dataclasses.replace(SHAPE, quantized_bytes=0.516, head_bytes=1.0)
    head, products = SHAPE.vocab * SHAPE.hidden, SHAPE.weight_bytes / 2 - 2 * SHAPE.vocab * 4096
    read = head + 0.516 * products
    assert decode_step_s(shape, H200, 1, 1) == pytest.approx(read / H200.bandwidth, rel=0.01)
    tied = dataclasses.replace(shape, is_tied=True)
    assert tied.weight_bytes == shape.weight_bytes
