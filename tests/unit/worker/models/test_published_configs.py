"""Published configurations of checkpoints, and refusals."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.pretrained_config import PretrainedConfig

_COMMON = {
    "vocab_size": 1000, "bos_token_id": 3, "eos_token_id": [7, 8], "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
PUBLISHED = {
    "mistral 7B 0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    },
    "qwen 2.5 7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1000000.0, "sliding_window": 131072,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "qwen 3 8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "attention_bias": False, "head_dim": 128, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
    "phi 3 mini 128k": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rope_scaling": {**_FACTORS, "type": "longrope"}, "sliding_window": 262144,
        "tie_word_embeddings": False,
    },
    "phi 4 mini": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {**_FACTORS, "type": "longrope"}, "rope_theta": 10000.0,
        "sliding_window": 262144, "tie_word_embeddings": True,
    },
    "gemma 2 9B": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 14336, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 1152, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "gpt-oss 20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


def config_of(values):
    return PretrainedConfig.from_huggingface({**_COMMON, **values}, "config.json")


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=list(PUBLISHED))
def test_a_published_configuration_means_what_it_does_to_transformers(values):
    theirs = AutoConfig.for_model(**{**_COMMON, **values}).to_dict()

    ours = config_of(values)

    # The configuration as transformers writes it today, with all defaults and layer types.
    assert ours == config_of({**theirs, "architectures": values["architectures"]})
    assert ours.eos_token_ids == (7, 8) and ours.dtype == "bfloat16"


def test_differences_between_families_are_read_from_the_configuration():
    mistral, qwen2, qwen3, phi3, phi4, gemma2, gemma3, oss = map(config_of, PUBLISHED.values())

    assert mistral.layer_windows == (4096,) * 32
    assert qwen2.qkv_bias and not qwen2.attn_bias and not qwen2.layer_windows
    assert qwen3.qk_norm and not qwen3.qkv_bias
    assert phi3.rope_scaling["factor"] == 32.0 and not phi3.rotary_size
    assert phi4.rotary_size == 96 and phi4.tie_word_embeddings
    assert gemma2.layer_windows == (4096, 0) * 21
    assert (gemma2.attn_soft_cap, gemma2.final_soft_cap) == (50.0, 30.0)
    assert gemma3.layer_windows == ((512,) * 5 + (0,)) * 4 + (512, 512)
    assert (gemma3.rotary_base, gemma3.local_rotary_base) == (1e6, 1e4)
    assert gemma3.qk_norm and gemma3.tie_word_embeddings and gemma3.norm_offset == 1.0
    assert oss.layer_windows == (128, 0) * 12 and oss.attn_sinks and oss.attn_bias
    assert (oss.num_experts, oss.num_experts_per_tok, oss.moe_bias) == (32, 4, True)
    assert (oss.swiglu_alpha, oss.swiglu_limit, oss.rotary_base) == (1.702, 7.0, 150000.0)


def test_a_known_architecture_with_an_unknown_model_type_is_served():
    assert config_of({**PUBLISHED["qwen 3 8B"], "model_type": "mine"}).qk_norm


def test_the_original_length_of_a_phi_3_comes_from_the_top_level_or_a_default():
    values = {**PUBLISHED["phi 3 mini 128k"]}
    del values["original_max_position_embeddings"]
    inside = {**values["rope_scaling"], "original_max_position_embeddings": 2048}
    values["rope_scaling"] = inside
    theirs = AutoConfig.for_model(**{**_COMMON, **values, "rope_scaling": {**inside}})

    scaling = config_of(values).rope_scaling

    name = "original_max_position_embeddings"
    assert scaling[name] == theirs.rope_parameters[name] == 4096


GEMMA3_OF_IMAGES = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106],
    "image_token_index": 262144, "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip


def test_the_text_decoder_of_a_multimodal_gemma_3_is_read():
    theirs = AutoConfig.for_model(**GEMMA3_OF_IMAGES).to_dict()

    ours = PretrainedConfig.from_huggingface(GEMMA3_OF_IMAGES, "config.json")

    spelled_out = {**theirs, "architectures": GEMMA3_OF_IMAGES["architectures"]}
    assert ours == PretrainedConfig.from_huggingface(spelled_out, "config.json")
    assert (ours.vocab_size, ours.num_attention_heads, ours.head_size) == (262208, 8, 256)
    assert ours.layer_windows[:7] == (1024,) * 5 + (0, 1024)
    assert ours.rope_scaling is not None and ours.rope_scaling["factor"] == 8.0
    assert ours.eos_token_ids == (1, 106) and ours.dtype == "bfloat16"


def test_a_logit_cap_of_a_multimodal_model_is_refused():
    text = {**GEMMA3_OF_IMAGES["text_config"], "final_logit_softcapping": 30.0}
    with pytest.raises(ConfigError, match=r"final_logit_softcapping is 30\.0"):
        config_of({**GEMMA3_OF_IMAGES, "text_config": text})


MISTRAL3_OF_IMAGES = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "image_token_index": 10, "spatial_merge_size": 2, "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "model_type": "mistral",
        "intermediate_size": 32768, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "vocab_size": 131072,
    },
}  # fmt: skip


def test_the_text_decoder_of_a_multimodal_mistral_3_is_read():
    ours = PretrainedConfig.from_huggingface(MISTRAL3_OF_IMAGES, "config.json")

    assert (ours.hidden_size, ours.head_size, ours.rotary_base) == (5120, 128, 1e9)
    assert not ours.tie_word_embeddings and not ours.layer_windows


def test_a_multimodal_model_with_an_unsupported_decoder_is_refused():
    text = {**MISTRAL3_OF_IMAGES["text_config"], "model_type": "ministral3"}
    with pytest.raises(ConfigError, match="model_type 'ministral3'"):
        config_of({**MISTRAL3_OF_IMAGES, "text_config": text})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral 7B 0.1", {"sliding_window": -3}, "sliding_window is -3"),
        ("gemma 2 9B", {"layer_types": ["chunked_attention"] * 42}, "chunked_attention"),
        ("gemma 2 9B", {"layer_types": ["sliding_attention"]}, "num_hidden_layers is 42"),
        ("gemma 3 1B", {"use_bidirectional_attention": True}, "must be false"),
        (
            "gemma 3 1B",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "rope_type 'yarn'",
        ),
        ("phi 3 mini 128k", {"original_max_position_embeddings": 0.5}, "0.5 but must be"),
        ("qwen 3 8B", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("mistral 7B 0.1", {"architectures": ["LlamaForCausalLM"]}, "is 'mistral', that of M"),
    ],
)
def test_configurations_that_are_not_served_are_refused_by_name_and_value(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of({**PUBLISHED[name], **changes})
