"""Published configurations of DeepSeek, and refusals."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.activations import ACT2FN

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.pretrained_config import PretrainedConfig

_COMMON = {
    "attention_bias": False, "bos_token_id": 3, "eos_token_id": [7, 8], "hidden_act": "silu",
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "pad_token_id": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 1000,
}  # fmt: skip
_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096,
    "type": "yarn",
}  # fmt: skip
_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "first_k_dense_replace": 1, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_experts_per_tok": 6, "scoring_func": "softmax",
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
PUBLISHED = {
    "V2 Lite": {
        **_V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "num_attention_heads": 16,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
    },
    "V2": {
        **_V2, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "n_group": 8, "n_routed_experts": 160, "num_attention_heads": 128,
        "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
    },
    "V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "routed_scaling_factor": 2.5,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    },
}  # fmt: skip


def config_of(values):
    return PretrainedConfig.from_huggingface({**_COMMON, **values}, "config.json")


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=list(PUBLISHED))
def test_a_published_configuration_means_what_it_does_to_transformers(values):
    theirs = AutoConfig.for_model(**{**_COMMON, **values}).to_dict()

    ours = config_of(values)

    # The configuration as transformers writes it today, with all defaults.
    assert ours == config_of({**theirs, "architectures": values["architectures"]})
    assert PretrainedConfig.from_dict(ours.to_dict(), "config.json") == ours


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=list(PUBLISHED))
def test_an_activation_has_both_of_its_names(values):
    numbers = torch.linspace(-9, 9, 50)
    assert ACT2FN["swish"](numbers).equal(ACT2FN["silu"](numbers))

    assert config_of({**values, "hidden_act": "swish"}) == config_of(values)


def test_differences_between_versions_are_read_from_the_configuration():
    lite, second, third = map(config_of, PUBLISHED.values())

    assert (lite.q_lora_rank, second.q_lora_rank, third.q_lora_rank) == (0, 1536, 1536)
    assert all(one.head_size == 192 and one.rotary_size == 64 for one in (lite, second, third))
    assert (lite.dense_layers, third.dense_layers) == ((0,), (0, 1, 2))
    assert (lite.topk_method, lite.norm_topk_prob) == ("greedy", False)
    assert (second.n_group, second.topk_group, second.routed_scaling_factor) == (8, 3, 16.0)
    assert (third.scoring_func, third.norm_topk_prob) == ("sigmoid", True)
    assert lite.shared_expert_intermediate_size == 2 * 1408 and not lite.shared_expert_gate
    # The root of 192, and the square of 0.1 ln 40 + 1.
    assert third.query_scale**-0.5 == pytest.approx(192**-0.5 * 1.3688879454**2)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("V2", {"norm_topk_prob": True}, "norm_topk_prob is true.*must be false"),
        ("V2", {"topk_method": "noaux_tc"}, "'noaux_tc'.*greedy or group_limited_greedy"),
        ("V2", {"mlp_bias": True}, "mlp_bias is true.*must be false"),
        ("V2", {"moe_layer_freq": 2}, "moe_layer_freq is 2.*must be 1"),
        ("V2", {"n_group": 7}, "n_group \\(7\\) must divide num_experts \\(160\\)"),
        ("V3", {"scoring_func": "softmax"}, "'softmax'.*must be sigmoid"),
        ("V3", {"kv_lora_rank": 0}, "kv_lora_rank is 0 but must be"),
    ],
)
def test_configurations_that_are_not_served_are_refused_by_name_and_value(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of({**PUBLISHED[name], **changes})
