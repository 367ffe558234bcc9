"""The dtype of a KV cache: its names, and the scales of heads beside a model; free of torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text
from trimaran.worker.config.pretrained_config import PretrainedConfig

ALGORITHMS = {"fp8": "FP8", "int8": "INT8"}
"""TensorRT-LLM's names (``kv_cache_quant_algo``) of caches of one byte a number."""

LARGEST = {"fp8": 448.0, "int8": 127.0}
"""The largest number of each kind of cache."""

SYNONYMS = {"fp8_e4m3": "fp8"}
_BITS = 8
FLOATS = ("float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", *ALGORITHMS, *SYNONYMS, *FLOATS)
"""Values of ``--kv-cache-dtype``."""

SCALES_FILE = "kv_cache_scales.json"
_BUILD = "trimaran build --{}_kv_cache --calib_dataset FILE"
_SCALE_NAME = re.compile(
    r"(?:^|\.)(?:layers|h)\.(\d+)\.(?:.*\.)?"
    r"(?:(k|v)_scale|(kv)_scale|(k|v)_proj\.output_scale)$"
)

_MODELOPT_FILE = "hf_quant_config.json"

Heads = tuple[float, ...]


def kv_algorithm(folder: Path, values: Mapping[str, Any]) -> str:
    """TensorRT-LLM's name of the KV cache that a Hugging Face folder describes. A cache that is
    not served has a short description as its name; the name is empty without a KV cache.

    ``values`` are those of ``config.json``.
    """
    sections = [values.get("quantization_config"), values.get("compression_config")]
    path = folder / _MODELOPT_FILE
    if path.is_file():
        try:
            sections.append(parse_json(read_text(path)))
        except (OSError, ValueError):
            return ""
    for section in sections:
        if not isinstance(section, Mapping):
            continue
        nested = section.get("quantization")
        every = {**section, **(nested if isinstance(nested, Mapping) else {})}
        if every.get("kv_cache_quant_algo"):
            return str(every["kv_cache_quant_algo"]).upper()
        if isinstance(every.get("kv_cache_scheme"), Mapping):
            return _algorithm_of_scheme(every["kv_cache_scheme"])
    return ""


def _algorithm_of_scheme(scheme: Mapping[str, Any]) -> str:
    """The same for the ``kv_cache_scheme`` of compressed-tensors."""
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    strategy = scheme.get("strategy") or "tensor"
    is_static = scheme.get("dynamic") in (None, False) and scheme.get("symmetric") is not False
    if bits == _BITS and is_static and strategy in ("tensor", "attn_head"):
        return {"float": "FP8", "int": "INT8"}.get(str(kind), str(kind))
    dynamic = "static" if is_static else "dynamic or asymmetric"
    return f"{bits} bits, {kind}, a scale by {strategy}, {dynamic}"


def scale_place(name: str) -> tuple[int, str] | None:
    """The layer of a tensor that scales the KV cache, and ``k``, ``v`` or ``kv``; None for
    other names.
    """
    found = _SCALE_NAME.search(name)
    if found is None:
        return None
    return int(found[1]), next(kind for kind in found.groups()[1:] if kind)


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of each layer's heads, by the layer's number in the whole model."""

    kind: str
    """The kind of cache that the scales were made for."""

    layers: Mapping[int, tuple[Heads, Heads]]
    """Scales of keys and of values: one for all heads, or one for each head of the model."""

    def for_kind(self, kind: str) -> KVScales:
        """Scales with which the same keys and values use the range of another kind."""
        factor = LARGEST[self.kind] / LARGEST[kind]
        return KVScales(
            kind,
            {
                layer: (tuple(k * factor for k in keys), tuple(v * factor for v in values))
                for layer, (keys, values) in self.layers.items()
            },
        )

    def check(self, num_layers: int, num_heads: int, source: str) -> None:
        """Raise ConfigError if a layer has no scales, other numbers of scales, or scales that
        are not positive.
        """
        for layer in range(num_layers):
            if layer not in self.layers:
                raise ConfigError(
                    f"{source}: layer {layer} of {num_layers} has no scales of the KV cache. "
                    f"Make them again: {_BUILD.format(self.kind)}."
                )
            for scales in self.layers[layer]:
                if len(scales) not in (1, num_heads):
                    raise ConfigError(
                        f"{source}: layer {layer} has {len(scales)} scales of the KV cache but "
                        f"must have 1, or one for each of {num_heads} heads. Make them again: "
                        f"{_BUILD.format(self.kind)}."
                    )
                if not all(0 < scale < math.inf for scale in scales):
                    raise ConfigError(
                        f"{source}: layer {layer} has KV cache scales {list(scales)} but each "
                        "must be a positive number. Make them again: "
                        f"{_BUILD.format(self.kind)}."
                    )

    def write(self, folder: Path) -> None:
        """Write ``kv_cache_scales.json``."""
        values = {
            "kv_cache_dtype": self.kind,
            "layers": {
                str(layer): {"k_scale": list(keys), "v_scale": list(heads)}
                for layer, (keys, heads) in sorted(self.layers.items())
            },
        }
        text = json.dumps(values, indent=1) + "\n"
        (folder / SCALES_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> KVScales | None:
        """The scales of ``kv_cache_scales.json``; None without the file.

        Raises:
            ConfigError: the file has another form.
        """
        path = folder / SCALES_FILE
        if not path.is_file():
            return None
        try:
            values = parse_json(read_text(path))
            kind = values["kv_cache_dtype"]
            layers = {int(layer): _heads(each) for layer, each in values["layers"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: cannot be read as scales of a KV cache ({error!r}). Build the folder "
                "again."
            ) from None
        if kind not in ALGORITHMS:
            raise ConfigError(
                f"{path}: kv_cache_dtype is {kind!r} but must be one of {', '.join(ALGORITHMS)}"
            )
        return cls(kind, layers)


def _heads(values: Any) -> tuple[Heads, Heads]:
    keys, heads = (tuple(float(x) for x in values[name]) for name in ("k_scale", "v_scale"))
    return keys, heads


def resolve_kv_cache_dtype(
    asked: str, config: PretrainedConfig, folder: Path, dtype: str
) -> str:
    """``fp8``, ``int8``, or ``dtype``, the model's own: as asked, or with ``auto`` as the
    folder says.

    Raises:
        ConfigError: the dtype is not served with this model.
    """
    source = f"--kv-cache-dtype {asked}"
    algorithm = config.kv_cache_quant_algo
    kind = SYNONYMS.get(asked, asked)
    if asked == "auto":
        kind = {name: kind for kind, name in ALGORITHMS.items()}.get(algorithm, dtype)
        if algorithm and kind == dtype:
            raise ConfigError(
                f"{folder}: the KV cache is to be {algorithm}, which is not served. Name "
                f"a served one: --kv-cache-dtype {dtype} or {' or '.join(ALGORITHMS)}."
            )
        source = f"{folder}: kv_cache_quant_algo {algorithm}"
    if kind in FLOATS and kind != dtype:
        raise ConfigError(
            f"{source}: the model runs in {dtype}, and its KV cache has the same dtype or one "
            f"byte a number ({', '.join(ALGORITHMS)}). Name one of these, or --dtype {kind}."
        )
    if kind in ALGORITHMS and config.kv_lora_rank:
        raise ConfigError(
            f"{source}: latent attention ({config.architecture}) keeps its vectors in the "
            f"model's dtype. Name --kv-cache-dtype {dtype}."
        )
    return kind


def check_scales_exist(kind: str, folder: Path, names: Iterable[str]) -> None:
    """Refuse an INT8 cache without scales; ``names`` are those of the folder's tensors."""
    if kind != "int8" or (folder / SCALES_FILE).is_file():
        return
    if any(scale_place(name) is not None for name in names):
        return
    raise ConfigError(
        f"{folder}: a KV cache of INT8 needs scales, and the folder holds none. Calibrate "
        f"some ({_BUILD.format('int8')}), or serve with --kv-cache-dtype fp8."
    )
