"""Published configurations of GPT-J, GPT-NeoX, Falcon and Phi."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import check_parallel_sizes
from trimaran.worker.config.pretrained_config import PretrainedConfig

_COMMON = {"bos_token_id": 3, "eos_token_id": 7, "torch_dtype": "bfloat16"}
PUBLISHED = {
    "gptj 6B": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_head": 16,
        "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True, "rotary_dim": 64,
        "tie_word_embeddings": False, "vocab_size": 50400,
    },
    "gpt neox 20B": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
        "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 64,
        "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "vocab_size": 50432,
    },
    "pythia 160M": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox",
        "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "num_attention_heads": 12,
        "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "falcon 7B": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False,
        "bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-5, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "num_kv_heads": 71, "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon 40B": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False,
        "bias": False, "hidden_size": 8192, "layer_norm_epsilon": 1e-5,
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_kv_heads": 8, "parallel_attn": True, "vocab_size": 65024,
    },
    "falcon 2 11B": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "activation": "gelu",
        "alibi": False, "bias": False, "ffn_hidden_size": 16384, "hidden_size": 4096,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 8192,
        "new_decoder_architecture": True, "num_attention_heads": 32, "num_hidden_layers": 60,
        "num_kv_heads": 8, "num_ln_in_parallel_attn": 1, "parallel_attn": True,
        "rope_scaling": None, "rope_theta": 500042.0, "tie_word_embeddings": False,
        "vocab_size": 65024,
    },
    "falcon rw 1B": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True,
        "bias": True, "hidden_size": 2048, "layer_norm_epsilon": 1e-5, "multi_query": False,
        "new_decoder_architecture": False, "num_attention_heads": 32, "num_hidden_layers": 24,
        "parallel_attn": False, "vocab_size": 50304,
    },
    "phi 2": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_act": "gelu_new",
        "hidden_size": 2560, "intermediate_size": 10240, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 51200,
    },
}  # fmt: skip


def config_of(values):
    return PretrainedConfig.from_huggingface({**_COMMON, **values}, "config.json")


@pytest.mark.parametrize("values", PUBLISHED.values(), ids=list(PUBLISHED))
def test_a_published_configuration_means_what_it_does_to_transformers(values):
    theirs = AutoConfig.for_model(**{**_COMMON, **values}).to_dict()

    # The configuration as transformers writes it today, with all defaults.
    assert config_of(values) == config_of({**theirs, "architectures": values["architectures"]})


def test_differences_between_families_are_read_from_the_configuration():
    gptj, neox, pythia, falcon7, falcon40, falcon2, rw, phi = map(config_of, PUBLISHED.values())

    assert (gptj.rotary_size, gptj.position_embedding_type) == (64, "rope_gptj")
    assert gptj.intermediate_size == 16384 and gptj.lm_head_bias and not gptj.attn_bias
    assert (neox.rotary_size, neox.head_size, neox.hidden_act) == (24, 96, "gelu_new")
    assert pythia.parallel_residual and pythia.num_input_norms == 2 and pythia.attn_bias
    assert falcon7.num_key_value_heads == 1 and falcon7.num_input_norms == 1
    assert falcon7.tie_word_embeddings and falcon7.max_position_embeddings == 2048
    assert falcon40.num_key_value_heads == 8 and falcon40.num_input_norms == 2
    assert falcon2.num_input_norms == 1 and falcon2.rotary_base == 500042.0
    assert rw.position_embedding_type == "alibi_with_scale" and rw.attn_bias
    assert rw.num_key_value_heads == 32 and not rw.parallel_residual
    assert phi.rotary_size == 32 and phi.lm_head_bias and phi.num_input_norms == 1


def test_more_ranks_than_heads_are_refused():
    falcon = config_of(PUBLISHED["falcon 7B"])
    check_parallel_sizes(falcon, 2, 1)
    with pytest.raises(
        ConfigError, match=r"tp_size \(72\) is above num_attention_heads \(71\)"
    ):
        check_parallel_sizes(falcon, 72, 1)
