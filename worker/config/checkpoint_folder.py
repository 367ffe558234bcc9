"""The weight files of a Hugging Face folder and their quantization method; free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.config.pretrained_families import FAMILIES
from trimaran.worker.config.quantization import QuantizationConfig
from trimaran.worker.config.quantization_formats import (
    SERVED_METHODS,
    read_quantization,
)
from trimaran.worker.config.schemes import NotServedError
from trimaran.worker.config.shard_file import TensorEntry, read_tensor_entries

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
_GPT_OSS, _GPT_OSS_METHOD = "gpt_oss", "mxfp4"
_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that a quantization method writes beside config.json if it adds no key there."""

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
"""Endings of tensor names that only quantized weights have; the surest signs come first."""

_FLOATS = ("F64", "F32", "F16", "BF16")
_REMEDY = "Name the checkpoint in bfloat16, float16 or float32"


def quantization_of_folder(
    folder: Path, values: Mapping[str, Any]
) -> QuantizationConfig | None:
    """The quantization in config.json or in a file beside config.json; None without
    quantization.

    Raises:
        ConfigError: the method or a part of the method is not served.
    """
    for key in ("quantization_config", "compression_config"):
        if values.get(key):
            source = f"{folder}/config.json"
            found = _served(source, values[key], key)
            kind = str(values.get("model_type"))
            if found.method == _GPT_OSS_METHOD and kind != _GPT_OSS:
                reason = f": in this format a model_type of {_GPT_OSS} is, and this is {kind}"
                raise _refusal(source, _TITLES[_GPT_OSS_METHOD], key, reason)
            return found
    for name, method in _FILES.items():
        path = folder / name
        if path.is_file():
            return _served(str(path), {"quant_method": method, **_read(path)}, "this file")
    return None


def _served(source: str, values: Any, sign: str) -> QuantizationConfig:
    try:
        return read_quantization(values if isinstance(values, dict) else {})
    except NotServedError as error:
        method = str(values.get("quant_method", "")) if isinstance(values, dict) else ""
        reason = f": {error}" if method.lower() in SERVED_METHODS else ""
        raise _refusal(source, _described(values), sign, reason) from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {sign}: {error}.") from None


def refuse_quantized_tensors(folder: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raise `ConfigError` if the names or dtypes of tensors are those of quantized weights."""
    for ending, method in _ENDINGS:
        name = next((name for name in entries if name.endswith(ending)), None)
        if name is not None:
            raise _refusal(str(folder), _TITLES[method], f"the tensor {name}")
    for name, entry in entries.items():
        is_weight = name.endswith(".weight") and len(entry.shape) > 1
        if is_weight and entry.dtype not in _FLOATS:
            raise _refusal(str(folder), entry.dtype, f"the tensor {name}")


def _described(quantization: Any) -> str:
    """The method's name, and its bits if the configuration has them."""
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


def _refusal(source: str, described: str, sign: str, reason: str = "") -> ConfigError:
    return ConfigError(
        f"{source}: the weights are quantized ({described}), as {sign} tells, which is not "
        f"served{reason}. {_REMEDY}."
    )


_LAYER_TENSOR = re.compile(r"(.*?\b(?:layers|h)\.)(\d+)(\..+\.(?:weight|bias))")
_FORMATS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
"""Stem and suffix of weight files; the first kind that exists is read, as in transformers."""

_HEAD = "lm_head.weight"
PEFT_CONFIG = "adapter_config.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """The only file, or the files that an index names, or else all numbered files.

    Raises:
        ConfigError: the folder has no weight file, or the index names a missing file.
    """
    for stem, suffix in _FORMATS:
        files = _files_of(folder, stem, suffix)
        if files:
            return files
    refuse_adapter(folder)
    suffixes = [suffix for _, suffix in _FORMATS]
    refuse_lost_links(file for file in sorted(folder.iterdir()) if file.suffix in suffixes)
    raise ConfigError(_no_weights(folder))


def refuse_adapter(folder: Path) -> None:
    """Refuse a PEFT folder without a model's own files.

    Raises:
        ConfigError: names the folder for what it is, and the base model that it names.
    """
    path = folder / PEFT_CONFIG
    if not path.is_file():
        return
    values = _read(path)
    base = values.get("base_model_name_or_path")
    kind = values.get("peft_type")
    raise ConfigError(
        f"{folder}: is a PEFT adapter ({f'{kind}, ' if isinstance(kind, str) else ''}"
        f"{PEFT_CONFIG}), not a model. Name the folder of its base model"
        f"{f', {base},' if isinstance(base, str) and base else ''} and give the adapter to "
        "`trimaran convert-lora`, or merge the adapter into the base model with peft "
        "(merge_and_unload, save_pretrained)."
    )


def stored_dtype(files: tuple[Path, ...]) -> str:
    """The dtype of most values in the first file; float32 if its header has no dtypes."""
    sizes = dict.fromkeys(_DTYPES, 0)
    for file in files[:1]:
        entries = read_tensor_entries(file) if file.suffix == ".safetensors" else {}
        for entry in entries.values():
            if entry.dtype in sizes:
                sizes[entry.dtype] += entry.num_bytes
    return _DTYPES[max(sizes, key=lambda word: sizes[word])]


def tied_unless_stored(files: tuple[Path, ...]) -> dict[str, bool]:
    """``tie_word_embeddings``: false if a file stores a head. Empty if the headers list no
    tensors.
    """
    if not files or any(file.suffix != ".safetensors" for file in files):
        return {}
    names = (name for file in files for name in read_tensor_entries(file))
    return {"tie_word_embeddings": not any(name.endswith(_HEAD) for name in names)}


def check_weight_files(folder: Path, files: tuple[Path, ...], config: PretrainedConfig) -> None:
    """Refuse quantized weights that the configuration does not describe, and tensors that only
    some of the layers have.

    Only the tensors of safetensors files are known without torch.
    """
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if file.suffix == ".safetensors":
            entries |= read_tensor_entries(file)
    if config.quantization is None:
        refuse_quantized_tensors(folder, entries)
    others = FAMILIES[config.architecture].ignored_parts
    names = {name for name in entries if not name.startswith(others)}
    if config.dense_layers:
        # The MLP of dense layers has different tensors from that of layers with experts.
        names = {name for name in names if ".mlp." not in name}
    if config.quantization is not None:
        # Matrices of some layers alone may be quantized, and then have other names.
        names = {name for name in names if len(entries[name].shape) == 1}
    _check_layers(folder, names, config.num_hidden_layers)


def _files_of(folder: Path, stem: str, suffix: str) -> tuple[Path, ...]:
    index = folder / f"{stem}{suffix}.index.json"
    single = folder / f"{stem}{suffix}"
    if single.is_file():
        return (single,)
    if not index.is_file():
        return tuple(sorted(folder.glob(f"{stem}-*{suffix}")))
    try:
        values = parse_json(index.read_text(encoding="utf-8"))
        names = sorted(set(values["weight_map"].values()))
        files = tuple(folder / name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ConfigError(f"{index}: holds no weight_map. Download the folder again.") from None
    except OSError as error:
        raise ConfigError(
            f"{index}: cannot be read ({error.strerror}). Correct its access rights, or "
            "download the folder again."
        ) from None
    absent = [file for file in files if not file.exists()]
    if absent:
        refuse_lost_links(absent)
        raise ConfigError(
            f"{absent[0]}: cannot be read: {len(absent)} of the {len(files)} files that "
            f"{index.name} names are not there. Download the folder again."
        )
    return files


def refuse_lost_links(paths: Iterable[Path]) -> None:
    """Refuse links whose targets are missing, such as those of an incomplete download cache.

    Raises:
        ConfigError: names the first such link and its target.
    """
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{path}: is a link to {os.readlink(path)}, which is not there. Mount or copy "
                "that too (a download cache has its files in `blobs`, beside `snapshots`), or "
                "download the folder again."
            )


def _no_weights(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return (
            f"{folder}: holds GGUF files alone, which are served once they are built: trimaran "
            "build --checkpoint FILE.gguf --output DIR."
        )
    if any(folder.glob("consolidated*")):
        return (
            f"{folder}: holds consolidated files, the format of the model's maker. Name its "
            "Hugging Face folder, whose files are called model*.safetensors."
        )
    others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors")))
    return (
        f"{folder}: holds no model.safetensors, model-*.safetensors or pytorch_model.bin"
        f"{f', only {others}' if others else ''}. Download the folder again, or save the "
        "weights with transformers (model.save_pretrained)."
    )


def _check_layers(folder: Path, names: set[str], num_layers: int) -> None:
    """Refuse tensors that only some of the layers have; needs no model."""
    numbers_of: dict[tuple[str, str], set[int]] = {}
    for name in names:
        found = _LAYER_TENSOR.match(name)
        # DeepSeek V3 has a layer of another kind after the last decoder layer.
        if found and int(found[2]) < num_layers:
            numbers_of.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (prefix, suffix), numbers in sorted(numbers_of.items()):
        for number in range(num_layers):
            if number not in numbers:
                raise ConfigError(
                    f"{folder}: the tensor '{prefix}{number}{suffix}' is missing, though "
                    f"config.json tells of {num_layers} layers. Download the folder again."
                )
