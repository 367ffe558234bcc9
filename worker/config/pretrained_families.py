"""Each served family's Hugging Face configuration, converted to `PretrainedConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.deepseek_families import from_deepseek_v2, from_deepseek_v3
from trimaran.worker.config.huggingface_keys import (
    activation_name,
    check_positive,
    partial_rope,
    rope,
    rotation,
)
from trimaran.worker.config.neox_families import from_falcon, from_gpt_neox, from_gptj, from_phi

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh")
PLAIN_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu")


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of an architecture that are needed before a model is built."""

    model_type: str
    """Hugging Face's ``model_type``, for a configuration without ``architectures``."""

    convert: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Converts Hugging Face's keys to fields of `PretrainedConfig`; raises KeyError for a
    missing key, and `ConfigError` for a value that is not served."""

    activations: tuple[str, ...]
    """Activations that the family's MLP serves."""

    activation_key: str = "hidden_act"
    """Hugging Face's key of the activation."""

    ignored_parts: tuple[str, ...] = ()
    """Prefixes of weight names whose part of the model is not served."""

    @property
    def is_gated(self) -> bool:
        """Whether an MLP multiplies its activated product by a second product of its inputs."""
        return self.activations is not PLAIN_ACTIVATIONS


def _from_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    check_positive("num_attention_heads", heads)
    rotary_base, rope_scaling = rope(values)
    return {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_size": values.get("head_dim") or values["hidden_size"] // heads,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values["rms_norm_eps"],
        "hidden_act": activation_name(values.get("hidden_act", "silu")),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rotary_base,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": bool(values.get("attention_bias", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
    }


def windows(values: Mapping[str, Any], sliding: Sequence[bool]) -> tuple[int, ...]:
    """Each layer's window, by ``layer_types`` or, where that is missing, by ``sliding``.

    () if no layer has a window.
    """
    size = values.get("sliding_window")
    types = values.get("layer_types")
    if types:
        sliding = [kind == "sliding_attention" for kind in types]
        unknown = set(types) - {"sliding_attention", "full_attention"}
        if unknown:
            raise ConfigError(
                f"layer_types holds {sorted(unknown)}, which are not served. Served are "
                "sliding_attention and full_attention"
            )
    if size is None or not any(sliding):
        return ()
    check_positive("sliding_window", size)
    return tuple(size if one else 0 for one in sliding)


def _from_mistral(values: Mapping[str, Any]) -> dict[str, Any]:
    common = _from_llama(values)
    everywhere = [True] * common["num_hidden_layers"]
    return {**common, "layer_windows": windows(values, everywhere)}


def _from_qwen2(values: Mapping[str, Any]) -> dict[str, Any]:
    common = _from_llama(values)
    first = values.get("max_window_layers", 28)
    sizes = _switched_windows(values, [number >= first for number in _layers(common)])
    return {**common, "attn_bias": False, "qkv_bias": True, "layer_windows": sizes}


def _switched_windows(values: Mapping[str, Any], sliding: Sequence[bool]) -> tuple[int, ...]:
    """Windows of Qwen's models, which are disabled unless the configuration enables them."""
    is_on = bool(values.get("use_sliding_window"))
    return windows(values if is_on else {**values, "sliding_window": None}, sliding)


def _from_qwen3(values: Mapping[str, Any]) -> dict[str, Any]:
    attn_bias = bool(values.get("attention_bias", False))
    # The default is a constant, not the hidden size divided by the heads.
    head_size = values.get("head_dim") or 128
    changes = {"attn_bias": attn_bias, "qkv_bias": False, "qk_norm": True}
    return {**_from_qwen2(values), **changes, "head_size": head_size}


def _from_phi3(values: Mapping[str, Any]) -> dict[str, Any]:
    base, scaling, fraction = partial_rope(_as_longrope(values))
    plain = {"rope_scaling": None, "rope_parameters": {"rope_theta": base}}
    common = _from_mistral({**values, **plain, "partial_rotary_factor": None})
    rotated = int(common["head_size"] * fraction)
    check_positive("partial_rotary_factor times the head size", rotated)
    return {
        **common,
        "rotary_size": 0 if rotated == common["head_size"] else rotated,
        "rope_scaling": scaling,
    }


def _as_longrope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Phi's scaling under its current name; earlier names are ``su`` and ``yarn``."""
    scaling = rotation(values)
    if scaling["rope_type"] not in ("su", "yarn"):
        return values
    named = {"rope_parameters": {**scaling, "rope_type": "longrope"}}
    return {**values, "rope_scaling": None, **named}


def _from_gemma2(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("use_bidirectional_attention"):
        raise ConfigError(
            "use_bidirectional_attention is true, which is not served. It must be false"
        )
    defaults = {"head_dim": 256, "tie_word_embeddings": True}
    common = _from_llama({**defaults, **values})
    alternating = [number % 2 == 0 for number in range(common["num_hidden_layers"])]
    return {
        **common,
        "hidden_act": activation_name(values.get("hidden_activation") or "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "query_scale": float(values.get("query_pre_attn_scalar", 256)),
        "attn_soft_cap": float(values.get("attn_logit_softcapping") or 0.0),
        "final_soft_cap": float(values.get("final_logit_softcapping") or 0.0),
        "layer_windows": windows(values, alternating),
    }


def _from_gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3: a rotation for each kind of layer, or one with another base for local layers."""
    if values.get("attn_logit_softcapping"):
        raise ConfigError(
            f"attn_logit_softcapping is {values['attn_logit_softcapping']}, which transformers "
            "leaves out of Gemma 3's attention. It must be null"
        )
    whole, local_base = _gemma3_rotations(values)
    # If each kind of layer has its own rotation, transformers reads these keys only there.
    outside = {"rope_scaling": None, "original_max_position_embeddings": None}
    common = _from_gemma2({**values, **outside, "rope_parameters": whole})
    period = values.get("sliding_window_pattern", 6)
    sliding = [(number + 1) % period > 0 for number in range(common["num_hidden_layers"])]
    return {
        **common,
        "qk_norm": True,
        "local_rotary_base": local_base,
        "layer_windows": windows(values, sliding),
    }


def _gemma3_rotations(values: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The rotation of layers without a window, and the rotary base of layers with a window."""
    kinds, older = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if "rope_type" not in older and older.get("type", "default") != "default":
        raise ConfigError(
            f"rope_scaling has the type {older['type']!r}, which transformers overlooks in "
            "Gemma 3. Call the key rope_type, or take rope_scaling out"
        )
    whole = {**(kinds.get("full_attention") or {}), **older}
    base = whole.get("rope_theta") or values.get("rope_theta") or 1000000.0
    local = kinds.get("sliding_attention") or {}
    local_type = rotation({"rope_parameters": local})["rope_type"]
    if local_type != "default":
        raise ConfigError(
            f"rope_parameters of sliding_attention have the rope_type {local_type!r}, "
            "which is not served. It must be default"
        )
    local_base = local.get("rope_theta") or values.get("rope_local_base_freq") or 10000.0
    return {**whole, "rope_theta": base}, float(local_base)


def _from_gemma3_of_images(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("final_logit_softcapping"):
        raise ConfigError(
            f"final_logit_softcapping is {values['final_logit_softcapping']}, which "
            "transformers leaves out of a Gemma 3 that takes images. It must be null"
        )
    return _from_gemma3(values)


def _from_mistral3(values: Mapping[str, Any]) -> dict[str, Any]:
    kind = values.get("model_type", "mistral")
    if kind != "mistral":
        raise ConfigError(
            f"text_config has the model_type {kind!r}, which is not served for Mistral 3. It "
            "must be 'mistral'"
        )
    return _from_mistral(values)


_OUTSIDE = (
    "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id",
    "tie_word_embeddings",
)  # fmt: skip


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the decoder of a model that also takes images; else ``values``.

    Some keys may also be at the top level, and count there.
    """
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return values
    outer = {key: values[key] for key in _OUTSIDE if values.get(key) is not None}
    return {**inner, **outer}


def _from_mixtral(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = _experts(values, values["intermediate_size"])
    return {**_from_mistral(values), **experts, "norm_topk_prob": True}


def _from_qwen2_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    common = _from_llama(values)
    end = values.get("max_window_layers", 28)
    sliding = [number % 2 == 0 and number < end for number in _layers(common)]
    return {
        **common,
        **_experts(values, values["moe_intermediate_size"]),
        "attn_bias": False,
        "qkv_bias": bool(values.get("qkv_bias", True)),
        "layer_windows": _switched_windows(values, sliding),
        "shared_expert_intermediate_size": values["shared_expert_intermediate_size"],
    }


def _from_qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    common = _from_llama(values)
    everywhere = [True for _ in _layers(common)]
    return {
        **common,
        **_experts(values, values["moe_intermediate_size"]),
        "qk_norm": True,
        "layer_windows": _switched_windows(values, everywhere),
    }


_GPT_OSS_ROTATION = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _from_gpt_oss(values: Mapping[str, Any]) -> dict[str, Any]:
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values = {**values, "rope_parameters": _GPT_OSS_ROTATION}
    common = _from_llama(values)
    alternating = [number % 2 == 0 for number in _layers(common)]
    for name in ("swiglu_alpha", "swiglu_limit"):
        if not values[name]:
            raise ConfigError(
                f"{name} is {values[name]!r}, which is not served for gpt-oss. It must be a "
                "number above 0"
            )
    return {
        **common,
        **_experts(values, values["intermediate_size"]),
        "norm_topk_prob": True,
        "layer_windows": windows(values, alternating),
        "attn_sinks": True,
        "moe_bias": True,
        "swiglu_alpha": float(values["swiglu_alpha"]),
        "swiglu_limit": float(values["swiglu_limit"]),
    }


def _layers(common: Mapping[str, Any]) -> range:
    return range(common["num_hidden_layers"])


def _experts(values: Mapping[str, Any], inner: int) -> dict[str, Any]:
    """The fields that all mixtures of experts set, with this inner width."""
    dense, every = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step", 1)
    numbers = range(values["num_hidden_layers"])
    named = values.get("num_local_experts") or values["num_experts"]
    check_positive("num_experts", named)
    check_positive("decoder_sparse_step", every)
    return {
        "num_experts": named,
        "num_experts_per_tok": values["num_experts_per_tok"],
        "moe_intermediate_size": inner,
        "norm_topk_prob": bool(values.get("norm_topk_prob")),
        "dense_layers": tuple(n for n in numbers if n in dense or (n + 1) % every),
    }


def _from_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["n_head"], values["n_embd"]
    check_positive("n_head", heads)
    if values.get("add_cross_attention"):
        raise ConfigError(
            "add_cross_attention is true, which is not served for GPT-2. It must be false"
        )
    if hidden % heads:
        raise ConfigError(f"n_embd ({hidden}) is not a multiple of n_head ({heads})")
    return {
        "hidden_size": hidden,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "num_hidden_layers": values["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "max_position_embeddings": values["n_positions"],
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        "hidden_act": activation_name(values.get("activation_function", "gelu_new")),
        "position_embedding_type": "learned_absolute",
        "query_scale": 0.0 if values.get("scale_attn_weights", True) else 1.0,
        "attn_divided_by_layer": bool(values.get("scale_attn_by_inverse_layer_idx")),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", True)),
        "attn_bias": True,
        "mlp_bias": True,
    }


_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _from_llama, GATED_ACTIVATIONS),
    "MistralForCausalLM": Family("mistral", _from_mistral, GATED_ACTIVATIONS),
    "Qwen2ForCausalLM": Family("qwen2", _from_qwen2, GATED_ACTIVATIONS),
    "Qwen3ForCausalLM": Family("qwen3", _from_qwen3, GATED_ACTIVATIONS),
    "Phi3ForCausalLM": Family("phi3", _from_phi3, GATED_ACTIVATIONS),
    "Gemma2ForCausalLM": Family("gemma2", _from_gemma2, GATED_ACTIVATIONS, "hidden_activation"),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", _from_gemma3, GATED_ACTIVATIONS, "hidden_activation"
    ),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3",
        _from_gemma3_of_images,
        GATED_ACTIVATIONS,
        "hidden_activation",
        _OF_IMAGES,
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral3", _from_mistral3, GATED_ACTIVATIONS, ignored_parts=_OF_IMAGES
    ),
    "MixtralForCausalLM": Family("mixtral", _from_mixtral, ("silu",)),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _from_qwen2_moe, ("silu",)),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _from_qwen3_moe, ("silu",)),
    "GptOssForCausalLM": Family("gpt_oss", _from_gpt_oss, ("silu",)),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", from_deepseek_v2, ("silu",)),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", from_deepseek_v3, ("silu",)),
    "GPT2LMHeadModel": Family("gpt2", _from_gpt2, PLAIN_ACTIVATIONS, "activation_function"),
    "GPTJForCausalLM": Family("gptj", from_gptj, PLAIN_ACTIVATIONS, "activation_function"),
    "GPTNeoXForCausalLM": Family("gpt_neox", from_gpt_neox, PLAIN_ACTIVATIONS),
    "FalconForCausalLM": Family("falcon", from_falcon, PLAIN_ACTIVATIONS, "activation"),
    "PhiForCausalLM": Family("phi", from_phi, PLAIN_ACTIVATIONS),
}
"""By the architecture's name in `config.json`."""
