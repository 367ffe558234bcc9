"""LoRA adapters in the format of PEFT: a JSON file, and matrices named by layer."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.comm.files.json_types import JsonType, check_types
from trimaran.worker.config.checkpoint_folder import PEFT_CONFIG
from trimaran.worker.lora.layout import (
    MODULE_NAMES,
    AdapterFormatError,
    AdapterLayout,
    Matrices,
    check_modules,
    module_name,
)
from trimaran.worker.lora.tensor_file import TensorFile

PEFT_WEIGHTS = "adapter_model.safetensors"

# PEFT's name of a linear layer (the last word of its path, or the last two words), and its
# module, or the two modules whose outputs it concatenates. In Llama's MLP the gate projection
# is h_to_4h and the up projection is gate.
_PEFT_MODULES = {
    "gate_up_proj": "mlp_h_to_4h mlp_gate",
    "out_proj": "attn_dense",
    "attention.dense": "attn_dense",
    "self_attention.dense": "attn_dense",
    "self_attn.dense": "attn_dense",
    "fc_in": "mlp_h_to_4h",
    "fc_out": "mlp_4h_to_h",
    "mlp.fc1": "mlp_h_to_4h",
    "mlp.fc2": "mlp_4h_to_h",
    "dense_h_to_4h": "mlp_h_to_4h",
    "dense_4h_to_h": "mlp_4h_to_h",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_dense",
    "mlp.c_fc": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}


_TYPES = {
    "lora_alpha": JsonType.NUMBER,
    "alpha_pattern": JsonType.OBJECT,
    "use_rslora": JsonType.FLAG,
    "use_dora": JsonType.FLAG,
}
"""JSON types of the keys that are read; keys that are compared with one value need none."""

_LAYER = re.compile("[0-9]{1,9}")
_Shape = tuple[int, ...]
_Found = dict[str, tuple[str, _Shape]]
"""The tensors ``lora_A`` and ``lora_B`` of a layer: name and shape in the file."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two tensors of one module of one layer."""

    module: int
    layer: int
    a_key: str
    b_key: str
    a_shape: _Shape
    b_shape: _Shape
    """Rows of ``lora_B`` that belong to this module."""

    first_row: int
    scale: float


class PeftAdapter:
    """A PEFT folder; the weights are read at their first use and then kept."""

    def __init__(self, folder: Path) -> None:
        """Read the configuration and the tensors' names and shapes, but no weights.

        Raises:
            AdapterFormatError: the folder holds no plain LoRA adapter of known layers.
        """
        self._weights = folder / PEFT_WEIGHTS
        config = _peft_config(folder)
        if not self._weights.is_file():
            raise AdapterFormatError(
                f"{folder}: holds no {PEFT_WEIGHTS}. Save the adapter with "
                "safe_serialization=True."
            )
        layers: dict[str, _Found] = {}
        self._tensors: dict[str, Tensor] | None = None
        self._file = TensorFile(self._weights)
        for key, stored in self._file.tensors.items():
            path, _, kind = key.removesuffix(".weight").rpartition(".")
            if kind not in ("lora_A", "lora_B"):
                raise AdapterFormatError(
                    f"{self._weights}: the tensor {key!r} is no LoRA matrix of a linear layer; "
                    "train the adapter on linear layers alone"
                )
            layers.setdefault(path, {})[kind] = key, stored.shape
        pairs = [
            pair for path, found in layers.items() for pair in self._named(config, path, found)
        ]
        self._pairs = sorted(pairs, key=lambda pair: (pair.layer, pair.module))
        for one, other in itertools.pairwise(self._pairs):
            if (one.layer, one.module) == (other.layer, other.module):
                raise AdapterFormatError(
                    f"{self._weights}: {one.a_key} and {other.a_key} both adapt "
                    f"{module_name(one.module)} of layer {one.layer}"
                )

    def _named(self, config: dict[str, Any], path: str, found: _Found) -> Iterator[_Pair]:
        words = path.split(".")
        names = (".".join(words[-2:]), words[-1])
        name = next((name for name in names if name in _PEFT_MODULES), None)
        layer = next((int(word) for word in words if _LAYER.fullmatch(word)), None)
        if name is None or layer is None or len(found) != 2:
            raise AdapterFormatError(
                f"{self._weights}: adapts {path!r}, which is none of the layers that are "
                f"known: {', '.join(_PEFT_MODULES)}"
            )
        (a_key, a_shape), (b_key, b_shape) = found["lora_A"], found["lora_B"]
        modules = _PEFT_MODULES[name].split()
        are_matrices = len(a_shape) == len(b_shape) == 2 and all((*a_shape, *b_shape))
        if not are_matrices or a_shape[0] != b_shape[1] or b_shape[0] % len(modules):
            parts = f", of {len(modules)} modules as large" if len(modules) > 1 else ""
            raise AdapterFormatError(
                f"{self._weights}: {a_key} has shape {list(a_shape)} and {b_key} "
                f"{list(b_shape)}, but they must be matrices [size, inputs] and [outputs, "
                f"size]{parts}, with a size of at least 1"
            )
        scale = _scale(config, words, a_shape[0])
        num_rows = b_shape[0] // len(modules)
        for index, module in enumerate(modules):
            yield _Pair(
                module=MODULE_NAMES.index(module),
                layer=layer,
                a_key=a_key,
                b_key=b_key,
                a_shape=a_shape,
                b_shape=(num_rows, *b_shape[1:]),
                first_row=index * num_rows,
                scale=scale,
            )

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(module, layer, rank) of every pair of matrices."""
        return [(pair.module, pair.layer, pair.a_shape[0]) for pair in self._pairs]

    def check(self, layout: AdapterLayout, max_rank: int) -> None:
        """Raise `AdapterFormatError` unless a model of this layout can use every matrix."""
        sources = [str(self._weights)] * len(self._pairs)
        check_modules(sources, self.ranks, layout, max_rank)
        for pair in self._pairs:
            whole = layout.shape_of(pair.module, pair.layer)
            assert whole is not None
            rank = pair.a_shape[0]
            if (pair.a_shape, pair.b_shape) != ((rank, whole[0]), (whole[1], rank)):
                raise AdapterFormatError(
                    f"{self._weights}: {pair.a_key} has shape {list(pair.a_shape)} and "
                    f"{pair.b_key} {list(pair.b_shape)}, but a layer of {whole[0]} inputs and "
                    f"{whole[1]} outputs needs {[rank, whole[0]]} and {[whole[1], rank]}. The "
                    "adapter belongs to another model."
                )

    def matrices(self, layout: AdapterLayout | None = None) -> Iterator[Matrices]:
        """The matrices by layer and module; the second matrices include the scaling.

        Raises:
            AdapterFormatError: the file cannot be read any more, or has changed.
        """
        if self._tensors is None:
            self._tensors = self._file.read()
        for pair in self._pairs:
            a = self._tensors[pair.a_key].float()
            b = self._tensors[pair.b_key].float() * pair.scale
            b = b.narrow(0, pair.first_row, pair.b_shape[0])
            yield Matrices(pair.module, pair.layer, a, b)


def _peft_config(folder: Path) -> dict[str, Any]:
    path = folder / PEFT_CONFIG
    try:
        config: dict[str, Any] = parse_json(read_text(path))
    except OSError as error:
        raise AdapterFormatError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise AdapterFormatError(f"{path}: is not JSON: {error}") from None
    _check_types(path, config)
    refused = {
        "peft_type": config.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(config.get("use_dora")),
        "bias": config.get("bias", "none") != "none",
        "modules_to_save": bool(config.get("modules_to_save")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise AdapterFormatError(
                f"{path}: {name} is {config[name]!r}, but only plain LoRA adapters of linear "
                "layers are served, without biases or whole modules"
            )
    return config


def _check_types(path: Path, config: Any) -> None:
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{path}: is {config!r:.40} but must be an object")
    try:
        check_types(config, _TYPES)
        patterns = config.get("alpha_pattern") or {}
        numbers = dict.fromkeys(patterns, JsonType.NUMBER)
        check_types(patterns, numbers, inside="alpha_pattern.", may_be_null=False)
        if "lora_alpha" in config:
            alpha = {"lora_alpha": config["lora_alpha"]}
            check_types(alpha, _TYPES, may_be_null=False)
    except ConfigError as error:
        raise AdapterFormatError(f"{path}: {error}") from None


def _scale(config: dict[str, Any], words: Sequence[str], rank: int) -> float:
    """``alpha / rank``, or ``alpha / sqrt(rank)`` (rank-stabilised), unless ``config`` has
    other values for this layer."""
    alpha = float(config.get("lora_alpha", rank))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if ".".join(words).endswith(pattern):
            alpha = float(value)
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
