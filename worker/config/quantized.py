"""Quantized checkpoints, recognised by what each method leaves in a folder; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.worker.config.shard_file import TensorEntry

_TITLES = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
}
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""What a method writes beside config.json, where it writes nothing into it."""

_ENDINGS = (
    (".g_idx", "gptq"),
    (".qzeros", "awq"),
    (".qweight", "gptq"),
    (".weight_scale_inv", "fp8"),
    (".weight_packed", "compressed-tensors"),
    (".absmax", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    ("_blocks", "mxfp4"),
    (".weight_scale", "fp8"),
)
"""How tensors are called beside which no weight is a plain one; the surer signs first."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_REMEDY = "Name the checkpoint in bfloat16, float16 or float32"


def refuse_quantized_folder(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if config.json, or a file beside it, tells of quantized weights."""
    for key in ("quantization_config", "compression_config"):
        if values.get(key):
            raise _refusal(f"{folder}/config.json", _described(values[key]), key)
    for name, method in _FILES.items():
        path = folder / name
        if path.is_file():
            described = _described({"quant_method": method, **_read(path)})
            raise _refusal(str(path), described, "this file")


def refuse_quantized_tensors(folder: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raise `ConfigError` if the names or types of tensors tell of quantized weights."""
    for ending, method in _ENDINGS:
        name = next((name for name in entries if name.endswith(ending)), None)
        if name is not None:
            raise _refusal(str(folder), _TITLES[method], f"the tensor {name}")
    for name, entry in entries.items():
        is_weight = name.endswith(".weight") and len(entry.shape) > 1
        if is_weight and entry.dtype not in _FLOATS:
            raise _refusal(str(folder), entry.dtype, f"the tensor {name}")


def _described(quantization: Any) -> str:
    """The method's name, and its bits where they are said."""
    values = quantization if isinstance(quantization, dict) else {}
    nested = values.get("quantization")
    values = {**values, **(nested if isinstance(nested, dict) else {})}
    method = str(values.get("quant_method") or values.get("quant_algo") or "unknown method")
    title = _TITLES.get(method.lower(), method)
    if values.get("quant_algo") and title == _TITLES["modelopt"]:
        title = f"{title}, {values['quant_algo']}"
    bits = values.get("bits") or values.get("w_bit")
    for number in (4, 8):
        if values.get(f"load_in_{number}bit") is True:
            bits = number
    return f"{title}, {bits} bits" if bits else title


def _read(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _refusal(source: str, described: str, sign: str) -> ConfigError:
    return ConfigError(
        f"{source}: the weights are quantized ({described}), as {sign} tells, which is not "
        f"served. {_REMEDY}."
    )
