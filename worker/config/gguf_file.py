"""GGUF files of Llama-like models: metadata, tensors and configuration; free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import require_file
from trimaran.worker.config.engine_folder import BuildConfig, EngineFolder, FolderKind
from trimaran.worker.config.pretrained_config import PretrainedConfig

if TYPE_CHECKING:
    from gguf import ReaderTensor

SUFFIX = ".gguf"
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures of GGUF that are read, and those of Hugging Face."""

GGUF_TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K",
    "Q5_K", "Q6_K",
)  # fmt: skip
"""Types of tensors that are dequantized."""

EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_TENSORS = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
"""Keys behind the architecture's name, and those of Hugging Face."""

_OPTIONAL = ("attention.head_count_kv", "attention.key_length", "rope.freq_base")
_CHECKED = (
    "attention.value_length", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scale_linear", "vocab_size", "expert_count", "expert_used_count",
    "tensor_data_layout",
)  # fmt: skip
"""Further keys that are read, or that change no result."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH = 8192
_FACTOR_ERROR = 1e-4
"""Largest relative difference between stored factors of frequencies and the formula's."""


class GgufFile:
    """An open GGUF file. Tensor data is mapped, and read at first use."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            ConfigError: the file is damaged, or not of a model that is read.
        """
        from gguf import GGUFReader  # imported late: only builds from GGUF use the package

        self.path = path
        try:
            require_file(path)
            reader = GGUFReader(path)
        except (OSError, ValueError, LookupError, OverflowError) as error:
            raise ConfigError(
                f"{path}: cannot be read as GGUF: {error}. Download the file again."
            ) from None
        if reader.byte_order != "I":
            raise ConfigError(
                f"{path}: has the byte order of other processors. Convert the file for this "
                "one."
            )
        self._fields = reader.fields
        self.tensors: dict[str, ReaderTensor] = {each.name: each for each in reader.tensors}
        """The tensors by the file's own names."""

        if self.value("split.count", 1) > 1:
            raise ConfigError(
                f"{path}: is one of {self.value('split.count')} parts of a model. Merge them "
                "(llama-gguf-split --merge FIRST_PART FILE.gguf)."
            )
        self.architecture = str(self.value("general.architecture", ""))
        if self.architecture not in GGUF_ARCHITECTURES:
            raise ConfigError(
                f"{path}: general.architecture is {self.architecture!r}, which is not read. "
                f"Read are {', '.join(GGUF_ARCHITECTURES)}; name the model's Hugging Face "
                "folder."
            )
        self._check_tensors()

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata under a key; float32 numbers as the shortest decimals for them."""
        field = self._fields.get(key)
        if field is None:
            return default
        found = field.contents()
        if isinstance(found, float):
            part = field.parts[field.data[0]]
            return float(str(part[0]))
        return found

    def model_value(self, key: str, default: Any = None) -> Any:
        """The metadata under a key behind the architecture's name."""
        return self.value(f"{self.architecture}.{key}", default)

    @property
    def model_keys(self) -> list[str]:
        """All keys behind the architecture's name."""
        prefix = f"{self.architecture}."
        return [key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)]

    def _check_tensors(self) -> None:
        for name, tensor in self.tensors.items():
            if tensor.tensor_type.name not in GGUF_TYPES:
                raise ConfigError(
                    f"{self.path}: the tensor {name!r} is {tensor.tensor_type.name}, which is "
                    f"not read. Read are {', '.join(GGUF_TYPES)}."
                )
        if EMBEDDING not in self.tensors:
            raise ConfigError(
                f"{self.path}: the tensor {EMBEDDING!r} is missing. Download the file again."
            )


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX


def open_gguf(path: Path) -> GgufFile:
    """An open file; opening it again costs nothing, since its vocabulary takes seconds.

    Raises:
        ConfigError: see `GgufFile`.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    return _opened(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(path: Path, num_bytes: int, mtime_ns: int) -> GgufFile:
    return GgufFile(path)


def huggingface_name(name: str) -> str | None:
    """The Hugging Face name of a tensor; None for a tensor that the configuration replaces.

    An unknown name is returned as it is.
    """
    if name == _ROPE_FACTORS:
        return None
    found = _LAYER_TENSOR.fullmatch(name)
    if found is None or found[2] not in _LAYER_TENSORS:
        return _TENSORS.get(name, name)
    return f"model.layers.{found[1]}.{_LAYER_TENSORS[found[2]]}.{found[3]}"


def load_gguf(path: Path) -> EngineFolder:
    """A GGUF file as a checkpoint in bfloat16 that any parallel sizes can load.

    Raises:
        ConfigError: see `GgufFile`; or the metadata name something that is not served.
    """
    config = PretrainedConfig.from_huggingface(huggingface_values(open_gguf(path)), str(path))
    return EngineFolder(
        path=path,
        kind=FolderKind.HUGGINGFACE,
        config=config,
        mapping=None,
        build=BuildConfig(max_input_len=config.max_position_embeddings),
        weight_files=(path,),
    )


def huggingface_values(file: GgufFile) -> dict[str, Any]:
    """The metadata as a Hugging Face ``config.json``.

    Raises:
        ConfigError: names the key whose value is missing or not served.
    """
    unknown = set(file.model_keys) - _KEYS.keys() - set(_CHECKED)
    if unknown:
        raise ConfigError(
            f"{file.path}: {file.architecture}.{min(unknown)} may change the model's results "
            "and is not read. Name the model's Hugging Face folder."
        )
    values = {ours: _number(file, key) for key, ours in _KEYS.items()}
    values = {key: value for key, value in values.items() if value is not None}
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    head_dim = values.setdefault("head_dim", hidden // max(1, heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        _check_value(file, key, head_dim)
    _check_value(file, "expert_count", 0)
    tokens = {
        f"{name}_token_id": file.value(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("pad", "padding"))
    }
    scaling = _rope_scaling(file, values)
    return {
        **values,
        **{key: value for key, value in tokens.items() if value is not None},
        **({"rope_scaling": scaling} if scaling else {}),
        "architectures": [GGUF_ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": int(file.tensors[EMBEDDING].shape[1]),
        "tie_word_embeddings": _HEAD not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "eos_token_id": _end_ids(file),
    }


def _end_ids(file: GgufFile) -> list[int]:
    """Ids that end an output: the end id of a text, then the end id of a chat turn."""
    ids = [file.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return list(dict.fromkeys(each for each in ids if each is not None))


def _number(file: GgufFile, key: str) -> Any:
    value = file.model_value(key)
    if value is None and key not in _OPTIONAL:
        raise ConfigError(
            f"{file.path}: the key {file.architecture}.{key} is missing. Download the file "
            "again, or name the model's Hugging Face folder."
        )
    if isinstance(value, list):
        raise ConfigError(
            f"{file.path}: {file.architecture}.{key} has a value for each layer, which is not "
            "served. Name a model whose layers have the same sizes."
        )
    return value


def _check_value(file: GgufFile, key: str, expected: int) -> None:
    value = file.model_value(key, expected)
    if value != expected:
        raise ConfigError(
            f"{file.path}: {file.architecture}.{key} is {value}, which is not read: it must be "
            f"{expected}. Name the model's Hugging Face folder."
        )


def _rope_scaling(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Hugging Face's dictionary for the file's scaled rotation; None for an unscaled one."""
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, values)
    kind = file.model_value("rope.scaling.type", "none")
    factor = file.model_value("rope.scaling.factor", file.model_value("rope.scale_linear"))
    if kind == "none" and factor is None:
        return None
    if kind in ("none", "linear") and factor is not None:
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    length = file.model_value("rope.scaling.original_context_length")
    if kind == "yarn" and factor and length:
        return {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length
        }  # fmt: skip
    raise ConfigError(
        f"{file.path}: {file.architecture}.rope.scaling.type is {kind!r} with the factor "
        f"{factor} and the length {length}, which is not read. Name the model's Hugging Face "
        "folder."
    )


def _llama3_scaling(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of Llama 3.1 to 3.3, of which a file stores the factors of frequencies."""
    stored = [float(each) for each in file.tensors[_ROPE_FACTORS].data.reshape(-1)]
    scaling = {
        "rope_type": "llama3", "factor": max(stored), **_LLAMA3,
        "original_max_position_embeddings": _LLAMA3_LENGTH,
    }  # fmt: skip
    low, high, factor = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"], max(stored)
    expected = []
    for index in range(len(stored)):
        base = values.get("rope_theta", 10000.0)
        turns = _LLAMA3_LENGTH / (2 * math.pi * base ** (2 * index / values["head_dim"]))
        ramp = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1.0 / ((1.0 - ramp) / factor + ramp))
    pairs = zip(stored, expected, strict=True)
    is_known = len(stored) * 2 == values["head_dim"] and all(
        abs(one - other) <= _FACTOR_ERROR * other for one, other in pairs
    )
    if not is_known:
        raise ConfigError(
            f"{file.path}: the factors in {_ROPE_FACTORS!r} are not those of Llama 3.1 to 3.3, "
            "which alone are read. Name the model's Hugging Face folder."
        )
    return scaling
