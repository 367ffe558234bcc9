"""The sizes and constants of a decoder, normalised from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.json_types import JsonType, check_field_types, check_types
from trimaran.worker.config.huggingface_keys import (
    check_huggingface_types,
    check_positive,
    check_rope_types,
    with_defaults,
)
from trimaran.worker.config.pretrained_families import FAMILIES, text_values
from trimaran.worker.config.quantization import QuantizationConfig

SERVED_ARCHITECTURES = tuple(FAMILIES)
SERVED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "float16", "bfloat16")
SCORING_FUNCS = ("softmax", "sigmoid")
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")

_RANGES = {
    JsonType.POSITIVE: ("rotary_base",),
    JsonType.AMOUNT: (
        "norm_epsilon", "local_rotary_base", "query_scale", "attn_soft_cap", "final_soft_cap",
        "rotary_size", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "num_experts", "moe_intermediate_size",
        "shared_expert_intermediate_size", "swiglu_alpha", "swiglu_limit",
    ),
}  # fmt: skip
_VOCAB_MULTIPLE = 64
_FLOATS = {"quant_algo": None, "kv_cache_quant_algo": None, "exclude_modules": None}
"""The ``quantization`` section of weights that have the model's dtype."""

_TUPLES = ("eos_token_ids", "layer_windows", "dense_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedConfig:
    """A decoder's sizes and constants; field names are those of the engine folder."""

    architecture: str
    dtype: str
    """Dtype of the stored weights: ``float32``, ``float16`` or ``bfloat16``."""

    logits_dtype: str = "float32"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    max_position_embeddings: int
    norm_epsilon: float
    hidden_act: str
    """``silu``, ``gelu_new`` (tanh form), ``gelu`` (exact) or ``relu``."""

    position_embedding_type: str
    """``rope_gpt_neox`` (rotates the halves of a head), ``rope_gptj`` (rotates neighbours),
    ``learned_absolute`` or ``alibi_with_scale`` (adds a bias by the key's position, then
    scales)."""

    rotary_base: float = 10000.0
    rotary_size: int = 0
    """Dims of a head that are rotated, starting with the first; 0 means all."""

    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's dictionary with its ``rope_type``; None for unscaled rotation."""

    tie_word_embeddings: bool = False
    attn_bias: bool = False
    """Whether query, key, value and output projections have biases."""

    qkv_bias: bool = False
    """Whether query, key and value projections have biases, independent of the output's."""

    qk_norm: bool = False
    """Whether each query and key head is normalised before its rotation."""

    query_scale: float = 0.0
    """Scores are divided by the root of this number; 0 means the head size."""

    attn_sinks: bool = False
    """Whether the softmax of each head also has a learned score of no key."""

    attn_divided_by_layer: bool = False
    """Whether scores are also divided by the layer's number, counted from 1."""

    attn_soft_cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0 disables the cap."""

    final_soft_cap: float = 0.0
    """The same cap for logits."""

    layer_windows: tuple[int, ...] = ()
    """Window of each layer in tokens, the query's included; 0 means no window. Empty if no
    layer has a window."""

    local_rotary_base: float = 0.0
    """Rotary base of the layers with a window, whose rotation is not scaled; 0 if all layers
    have the same rotation."""

    norm_offset: float = 0.0
    """Added to norm weights of a Hugging Face folder; an engine folder holds the sums."""

    kv_lora_rank: int = 0
    """Dims of a token's latent vector, from which the keys and values of all heads are
    computed; 0 if the cache holds keys and values."""

    q_lora_rank: int = 0
    """Dims of the latent vector of queries; 0 if queries come from the hidden state."""

    qk_nope_head_dim: int = 0
    """Dims of a query and key head that come from the latent vector, without rotation."""

    qk_rope_head_dim: int = 0
    """Rotated dims that follow; all heads share these dims of the key."""

    v_head_dim: int = 0

    mlp_bias: bool = False
    lm_head_bias: bool = False
    parallel_residual: bool = False
    """Whether attention and MLP of a layer read the same residual and are added together."""

    num_input_norms: int = 2
    """1 if attention and MLP of a layer read the output of the same norm."""

    num_experts: int = 0
    """Experts of a layer, in place of its MLP; 0 for a dense model."""

    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Inner width of an expert."""

    norm_topk_prob: bool = True
    """Whether the scores of a token's experts are divided by their sum."""

    scoring_func: str = "softmax"
    """Scores of the router's logits: ``softmax`` over all experts, or ``sigmoid`` of each."""

    topk_method: str = "greedy"
    """Selection of experts: ``greedy`` takes the best of all. ``group_limited_greedy`` takes
    the best of the ``topk_group`` groups with the best experts. ``noaux_tc`` adds a learned
    bias to scores, and ranks groups by the sum of their two best."""

    n_group: int = 1
    """Groups of consecutive experts."""

    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    """Factor of the final scores of a token's experts."""

    shared_expert_intermediate_size: int = 0
    """Inner width of the shared expert; 0 if there is none."""

    shared_expert_gate: bool = True
    """Whether a gate of its own weights the shared expert's output."""

    dense_layers: tuple[int, ...] = ()
    """Numbers of the layers that have an MLP of ``intermediate_size`` instead of experts."""

    moe_bias: bool = False
    """Whether the router and the matrices of experts have biases."""

    swiglu_alpha: float = 0.0
    """Factor of gates in the sigmoid of experts' SwiGLU, which is that of
    `kernels.routing.ExpertForm`; 0: plain SwiGLU."""

    swiglu_limit: float = 0.0
    """The bound of gates and ups in the same."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization: QuantizationConfig | None = None
    """Which weights are quantized; None if all have the model's dtype."""

    kv_cache_quant_algo: str = ""
    """``FP8`` or ``INT8`` for a KV cache with one byte a number; empty for the model's dtype.
    Other names are not served."""

    def __post_init__(self) -> None:
        _check_architecture(self.architecture)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_size",
            "max_position_embeddings",
        ):
            check_positive(name, getattr(self, name))
        for kind, names in _RANGES.items():
            check_types(
                {name: getattr(self, name) for name in names}, dict.fromkeys(names, kind)
            )
        if self.num_experts:
            _check_experts(self)
        for name in ("dtype", "logits_dtype"):
            _check_choice(name, getattr(self, name), DTYPES)
        _check_choice("hidden_act", self.hidden_act, FAMILIES[self.architecture].activations)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}). Correct the checkpoint's "
                "config.json."
            )
        if len(self.layer_windows) not in (0, self.num_hidden_layers):
            raise ConfigError(
                f"layer_windows has {len(self.layer_windows)} numbers but num_hidden_layers is "
                f"{self.num_hidden_layers}. Correct the checkpoint's layer_types."
            )
        for window in self.layer_windows:
            if window:
                check_positive("layer_windows", window)
        _check_rotation(self)

    @property
    def rotated_dims(self) -> int:
        """Dims of a head that are rotated."""
        return self.rotary_size or self.head_size

    def window_of(self, number: int) -> int:
        """Window of layer ``number`` in tokens; 0 means no window."""
        return self.layer_windows[number] if self.layer_windows else 0

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the sharded embedding and output matrices over all ranks of a stage."""
        multiple = math.lcm(_VOCAB_MULTIPLE, tp_size)
        return -(-self.vocab_size // multiple) * multiple

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``config.json``."""
        values = asdict(replace(self, quantization=None))
        for name in _TUPLES:
            values[name] = list(values[name])
        section = dict(_FLOATS) if self.quantization is None else self.quantization.to_dict()
        section["kv_cache_quant_algo"] = values.pop("kv_cache_quant_algo") or None
        values["quantization"] = section
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> PretrainedConfig:
        """The inverse of `to_dict`; ignores keys of other owners.

        ``source`` names the file in errors.
        """
        known = {field.name for field in fields(cls)}
        chosen = {key: value for key, value in values.items() if key in known}
        section = chosen.pop("quantization", None)
        quantization = (
            None if section is None else QuantizationConfig.from_dict(section, source)
        )
        algorithm = (section or {}).get("kv_cache_quant_algo")
        chosen["kv_cache_quant_algo"] = "" if algorithm is None else algorithm
        try:
            _check_architecture(chosen.get("architecture"))
            check_field_types(cls, chosen)
            check_rope_types(chosen.get("rope_scaling") or {}, "rope_scaling.")
            for name in _TUPLES:
                chosen[name] = tuple(chosen.get(name, ()))
            return cls(**chosen, quantization=quantization)
        except TypeError as error:
            raise ConfigError(
                f"{source}: {_missing_keys(error)}. Build the folder again."
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_huggingface(cls, values: Mapping[str, Any], source: str) -> PretrainedConfig:
        """Normalise a Hugging Face ``config.json``; ``source`` names the file in errors."""
        try:
            check_huggingface_types(values)
            architecture = _architecture_of(values)
            _check_architecture(architecture)
            family = FAMILIES[architecture]
            values = with_defaults(text_values(values), family.model_type)
            converted = family.convert(values)
            _check_choice(family.activation_key, converted["hidden_act"], family.activations)
            return cls(architecture=architecture, **_common(values), **converted)
        except KeyError as error:
            raise ConfigError(
                f"{source}: the key {error.args[0]!r} is missing. Name a complete Hugging Face "
                "folder."
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{source}: holds a value of the wrong type: {error}. Download the folder "
                "again."
            ) from None


def _architecture_of(values: Mapping[str, Any]) -> str:
    named = values.get("architectures") or []
    model_type = str(values.get("model_type", ""))
    served = {family.model_type: name for name, family in FAMILIES.items()}
    if not named:
        return served.get(model_type, model_type)
    architecture = str(named[0])
    of_type = served.get(model_type, architecture)
    if architecture in FAMILIES and architecture != of_type:
        # Transformers goes by model_type, most other programs by architectures.
        raise ConfigError(
            f"architectures names {architecture}, but model_type is {model_type!r}, that of "
            f"{of_type}. Correct the one that is wrong in config.json"
        )
    return architecture


def _check_architecture(architecture: Any) -> None:
    if architecture in SERVED_ARCHITECTURES:
        return
    raise ConfigError(
        f"the architecture {architecture or 'of this model'!r} is not served. Served are "
        f"{', '.join(SERVED_ARCHITECTURES)}; name a folder with one of these."
    )


def _check_experts(config: PretrainedConfig) -> None:
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        check_positive(name, getattr(config, name))
    if config.num_experts_per_tok > config.num_experts:
        raise ConfigError(
            f"num_experts_per_tok ({config.num_experts_per_tok}) is above num_experts "
            f"({config.num_experts}). Correct the checkpoint's config.json."
        )
    _check_choice("scoring_func", config.scoring_func, SCORING_FUNCS)
    _check_choice("topk_method", config.topk_method, TOPK_METHODS)
    if config.topk_method != "greedy":
        _check_groups(config)


def _check_rotation(config: PretrainedConfig) -> None:
    if config.rotary_size > config.head_size:
        raise ConfigError(
            f"rotary_size ({config.rotary_size}) is above head_size ({config.head_size}). "
            "Correct the checkpoint's config.json."
        )
    name = "rotary_size" if config.rotary_size else "head_size"
    if config.kv_lora_rank:
        name = "qk_rope_head_dim"
    dims = getattr(config, name)
    if config.position_embedding_type.startswith("rope") and (dims < 2 or dims % 2):
        raise ConfigError(
            f"{name} is {dims}, but so many dims of a head are rotated, which takes pairs: an "
            "even number from 2 on. Correct the checkpoint's config.json."
        )
    if config.rope_scaling is not None:
        _check_choice("rope_type", config.rope_scaling.get("rope_type"), SERVED_ROPE_TYPES)


def _check_groups(config: PretrainedConfig) -> None:
    for name in ("n_group", "topk_group"):
        check_positive(name, getattr(config, name))
    size, rest = divmod(config.num_experts, config.n_group)
    if rest or config.topk_group > config.n_group:
        raise ConfigError(
            f"n_group ({config.n_group}) must divide num_experts ({config.num_experts}) and "
            f"not be below topk_group ({config.topk_group}). Correct the checkpoint's "
            "config.json."
        )
    if size * config.topk_group < config.num_experts_per_tok:
        raise ConfigError(
            f"num_experts_per_tok ({config.num_experts_per_tok}) is above the "
            f"{size * config.topk_group} experts of topk_group ({config.topk_group}) groups. "
            "Correct the checkpoint's config.json."
        )
    if config.topk_method == "noaux_tc" and size == 1:
        raise ConfigError(
            "n_group is num_experts, but topk_method noaux_tc ranks a group by its two best "
            "experts. Correct the checkpoint's config.json."
        )


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r} but must be one of {', '.join(allowed)}")


def _missing_keys(error: TypeError) -> str:
    names = str(error).rpartition("argument")[2].lstrip("s: ")
    return f"missing or unknown keys: {names}"


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    eos = values.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": values["vocab_size"],
        "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": tuple(eos_ids),
        "pad_token_id": values.get("pad_token_id"),
    }
