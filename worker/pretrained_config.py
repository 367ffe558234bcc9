"""What a decoder's checkpoint says of its shape, normalised from a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from trimaran.comm.errors import ConfigError

SERVED_ARCHITECTURES = ("LlamaForCausalLM", "GPT2LMHeadModel")
SERVED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
}
_SERVED_ACTIVATIONS = {
    "LlamaForCausalLM": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh"),
    "GPT2LMHeadModel": ("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
}
_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedConfig:
    """A decoder's sizes and constants; field names are those of the engine folder."""

    architecture: str
    dtype: str
    """``float32``, ``float16`` or ``bfloat16``: of the weights as they are stored."""

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
    """``rope_gpt_neox`` or ``learned_absolute``."""

    rotary_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's dictionary with its ``rope_type``; None for plain rotation."""

    tie_word_embeddings: bool = False
    attn_bias: bool = False
    """Query, key, value and output projections have biases."""

    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

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
            _check_positive(name, getattr(self, name))
        for name in ("dtype", "logits_dtype"):
            _check_choice(name, getattr(self, name), DTYPES)
        _check_choice("hidden_act", self.hidden_act, _SERVED_ACTIVATIONS[self.architecture])
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}). Correct the checkpoint's "
                "config.json."
            )
        if self.rope_scaling is not None:
            _check_choice("rope_type", self.rope_scaling.get("rope_type"), SERVED_ROPE_TYPES)

    def padded_vocab_size(self, tp_size: int) -> int:
        """Rows of the sharded embedding and output matrices over all ranks of a stage."""
        multiple = math.lcm(_VOCAB_MULTIPLE, tp_size)
        return -(-self.vocab_size // multiple) * multiple

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``config.json``."""
        values = asdict(self)
        values["eos_token_ids"] = list(self.eos_token_ids)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str) -> PretrainedConfig:
        """The inverse of `to_dict`; keys of other owners are left out.

        ``source`` names the file in errors.
        """
        known = {field.name for field in fields(cls)}
        chosen = {key: value for key, value in values.items() if key in known}
        try:
            _check_architecture(chosen.get("architecture"))
            chosen["eos_token_ids"] = tuple(chosen.get("eos_token_ids", ()))
            return cls(**chosen)
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
            architecture = _architecture_of(values)
            _check_architecture(architecture)
            _check_unquantized(values)
            convert = _from_llama if architecture == "LlamaForCausalLM" else _from_gpt2
            return cls(architecture=architecture, **_common(values), **convert(values))
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
    if named:
        return str(named[0])
    model_type = str(values.get("model_type", ""))
    return _ARCHITECTURE_OF_MODEL_TYPE.get(model_type, model_type)


def _check_architecture(architecture: Any) -> None:
    if architecture in SERVED_ARCHITECTURES:
        return
    kind = " (a mixture of experts)" if architecture == "MixtralForCausalLM" else ""
    raise ConfigError(
        f"the architecture {architecture or 'of this model'!r}{kind} is not served. Served are "
        f"{', '.join(SERVED_ARCHITECTURES)}; name a folder with one of these."
    )


def _check_unquantized(values: Mapping[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization:
        raise ConfigError(
            f"the weights are quantized ({quantization.get('quant_method')!r}), which is not "
            "served. Name the checkpoint in bfloat16, float16 or float32."
        )


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r} but must be a whole number of 1 or more")


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


def _from_llama(values: Mapping[str, Any]) -> dict[str, Any]:
    heads = values["num_attention_heads"]
    _check_positive("num_attention_heads", heads)
    rotary_base, rope_scaling = _rope(values)
    return {
        "hidden_size": values["hidden_size"],
        "intermediate_size": values["intermediate_size"],
        "num_hidden_layers": values["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("num_key_value_heads") or heads,
        "head_size": values.get("head_dim") or values["hidden_size"] // heads,
        "max_position_embeddings": values["max_position_embeddings"],
        "norm_epsilon": values["rms_norm_eps"],
        "hidden_act": values.get("hidden_act", "silu"),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rotary_base,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", False)),
        "attn_bias": bool(values.get("attention_bias", False)),
        "mlp_bias": bool(values.get("mlp_bias", False)),
    }


def _rope(values: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from either spelling: `rope_parameters` or `rope_scaling`."""
    scaling = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    base = float(scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0)
    share = scaling.pop("partial_rotary_factor", None)
    if share not in (None, 1.0):
        raise ConfigError(
            f"partial_rotary_factor is {share}, which is not served. It must be 1"
        )
    scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    return base, None if scaling["rope_type"] == "default" else scaling


def _from_gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = values["n_head"], values["n_embd"]
    _check_positive("n_head", heads)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if values.get(name):
            raise ConfigError(
                f"{name} is true, which is not served for GPT-2. It must be false"
            )
    if values.get("scale_attn_weights") is False:
        raise ConfigError("scale_attn_weights is false, which is not served. It must be true")
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
        "hidden_act": values.get("activation_function", "gelu_new"),
        "position_embedding_type": "learned_absolute",
        "tie_word_embeddings": bool(values.get("tie_word_embeddings", True)),
        "attn_bias": True,
        "mlp_bias": True,
    }
