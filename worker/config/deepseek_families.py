"""Configurations of DeepSeek V2 and V3: latent attention, and expert routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.huggingface_keys import (
    activation_name,
    check_positive,
    rope,
    yarn_scale,
)

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def from_deepseek_v2(values: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V2 and V2 Lite: experts of highest score, optionally within the best groups."""
    if values.get("norm_topk_prob"):
        # With norm_topk_prob the published code drops the scaling, transformers the
        # normalisation.
        raise ConfigError(
            "norm_topk_prob is true, which is not served for DeepSeek V2, as its own code and "
            "transformers mean different things by it. It must be false"
        )
    method = _choice(values, "topk_method", ("greedy", "group_limited_greedy"))
    _choice(values, "scoring_func", ("softmax",))
    return {
        **_common(values, "rope_gptj"),
        **_experts(values, values.get("first_k_dense_replace") or 0),
        "norm_topk_prob": False,
        "topk_method": method,
        "routed_scaling_factor": float(values.get("routed_scaling_factor", 1.0)),
    }


def from_deepseek_v3(values: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V3 and R1: the experts of highest sigmoid plus a learned bias, within the best
    groups."""
    is_interleaved = values.get("rope_interleave", True)
    return {
        **_common(values, "rope_gptj" if is_interleaved else "rope_gpt_neox"),
        **_experts(values, values.get("first_k_dense_replace", 3)),
        "norm_topk_prob": bool(values.get("norm_topk_prob", True)),
        "scoring_func": _choice(values, "scoring_func", ("sigmoid",)),
        "topk_method": _choice(values, "topk_method", ("noaux_tc",)),
        "routed_scaling_factor": float(values.get("routed_scaling_factor", 2.5)),
    }


def _common(values: Mapping[str, Any], position_embedding_type: str) -> dict[str, Any]:
    sizes = {name: values[name] for name in _SIZES}
    for name, size in sizes.items():
        check_positive(name, size)
    if values.get("mlp_bias"):
        raise ConfigError(
            "mlp_bias is true, which is not served for DeepSeek. It must be false"
        )
    query_rank = values.get("q_lora_rank") or 0
    if query_rank:
        check_positive("q_lora_rank", query_rank)
    base, scaling = rope(values)
    head_size = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    return {
        **sizes,
        "q_lora_rank": query_rank,
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": values["num_attention_heads"],
        # All heads share a token's latent vector.
        "num_key_value_heads": 1,
        "head_size": head_size,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "hidden_act": activation_name(values.get("hidden_act", "silu")),
        "position_embedding_type": position_embedding_type,
        "rotary_base": base,
        "rotary_size": sizes["qk_rope_head_dim"],
        "rope_scaling": scaling,
        "query_scale": _query_scale(head_size, scaling),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": bool(values.get("attention_bias", False)),
    }


def _query_scale(head_size: int, scaling: Mapping[str, Any] | None) -> float:
    """The factor of scores, with the square of YaRN's scale if the checkpoint sets that
    scale.
    """
    weight = scaling.get("mscale_all_dim") if scaling else None
    if not scaling or not weight:
        return float(head_size)
    return float(head_size / yarn_scale(float(scaling["factor"]), float(weight)) ** 4)


def _experts(values: Mapping[str, Any], num_dense: int) -> dict[str, Any]:
    """The sizes of experts, which all layers but the first ``num_dense`` have."""
    if values.get("moe_layer_freq", 1) != 1:
        raise ConfigError(
            f"moe_layer_freq is {values['moe_layer_freq']}, which is not served. It must be 1"
        )
    for name in ("n_routed_experts", "moe_intermediate_size"):
        check_positive(name, values[name])
    inner = values["moe_intermediate_size"]
    return {
        "num_experts": values["n_routed_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "moe_intermediate_size": inner,
        "n_group": values.get("n_group") or 1,
        "topk_group": values.get("topk_group") or 1,
        "shared_expert_intermediate_size": inner * (values.get("n_shared_experts") or 0),
        "shared_expert_gate": False,
        "dense_layers": tuple(range(min(num_dense, values["num_hidden_layers"]))),
    }


def _choice(values: Mapping[str, Any], name: str, served: tuple[str, ...]) -> str:
    """The value of a key; the first served value if the key is missing."""
    value = values.get(name) or served[0]
    if value not in served:
        raise ConfigError(
            f"{name} is {value!r}, which is not served for this architecture. It must be "
            f"{' or '.join(served)}"
        )
    return str(value)
