"""The scales of a quantized KV cache: read from a model folder, given to a rank's layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels.kv_quantization import KV_DTYPES, head_scales
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.kv_cache_dtype import (
    ALGORITHMS,
    KVScales,
    check_scales_exist,
    resolve_kv_cache_dtype,
    scale_place,
)
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.weights.checkpoint import file_entries, mapped_file
from trimaran.worker.parallel.partition import partition_heads

logger = logging.getLogger(__name__)

_FP8_CAPABILITY = (8, 9)
"""The first GPUs that convert FP8."""


def stored_kv_scales(files: Sequence[Path], kind: str) -> KVScales | None:
    """The scales among the tensors of a checkpoint, made for a cache of ``kind``; None if there
    are none.

    A single ``kv_scale`` serves keys and values; keys or values without a scale have 1.
    """
    found: dict[int, dict[str, tuple[float, ...]]] = {}
    for path in files:
        names = [name for name in file_entries(path) if scale_place(name) is not None]
        if not names:
            continue
        with mapped_file(path) as read:
            for name in names:
                place = scale_place(name)
                assert place is not None
                values = tuple(read(name).float().flatten().tolist())
                found.setdefault(place[0], {})[place[1]] = values
    if not found:
        return None
    layers = {}
    for layer, scales in found.items():
        usual = scales.get("kv", (1.0,))
        layers[layer] = scales.get("k", usual), scales.get("v", usual)
    return KVScales(kind, layers)


def folder_kv_scales(folder: EngineFolder) -> KVScales | None:
    """The scales of a folder: those of its own file before those of a checkpoint's tensors."""
    scales = KVScales.read(folder.path)
    if scales is None and folder.mapping is None:
        kinds = {name: kind for kind, name in ALGORITHMS.items()}
        kind = kinds.get(folder.config.kv_cache_quant_algo, "fp8")
        scales = stored_kv_scales(folder.weight_files, kind)
    return scales


def quantized_kv_dtype(
    folder: EngineFolder, asked: str, dtype: torch.dtype
) -> torch.dtype | None:
    """The dtype of the quantized KV cache that ``--kv-cache-dtype`` asks for; None for a cache
    in the model's ``dtype``.

    Raises:
        ConfigError: as `quantize_kv_cache`, if the dtype is not served with the model.
    """
    name = str(dtype).removeprefix("torch.")
    return KV_DTYPES.get(resolve_kv_cache_dtype(asked, folder.config, folder.path, name))


def quantize_kv_cache(
    model: CausalLM, folder: EngineFolder, asked: str, *, has_weights: bool = True
) -> None:
    """Let a model's layers store keys and values as ``--kv-cache-dtype`` asks. Before any layer
    is fused or run.

    A model without weights of its own (``has_weights``) has scales of 1.

    Raises:
        ConfigError: the dtype is not served with the model or on its device, or its scales are
            absent or damaged.
    """
    dtype = str(model.context.dtype).removeprefix("torch.")
    kind = resolve_kv_cache_dtype(asked, folder.config, folder.path, dtype)
    if kind not in ALGORITHMS:
        return
    _check_device(kind, model.device, dtype)
    scales = folder_kv_scales(folder) if has_weights else None
    heads = folder.config.num_key_value_heads
    if scales is None:
        if has_weights:
            check_scales_exist(kind, folder.path, ())
            log = logger.warning if _is_first(model) else logger.debug
            log(
                "KV CACHE WITHOUT SCALES: %s holds none, so keys and values are stored in FP8 "
                "with the scale 1.0, which costs accuracy. Calibrate scales with `trimaran "
                "build --fp8_kv_cache --calib_dataset FILE`.",
                folder.path,
            )
    else:
        scales.check(folder.config.num_hidden_layers, heads, str(folder.path))
        scales = scales.for_kind(kind)
    model.cache_dtype = KV_DTYPES[kind]
    for number, layer in zip(model.layer_numbers(), model.layers.values(), strict=True):
        keys, values = ((1.0,), (1.0,)) if scales is None else scales.layers[number]
        attention: Any = layer.attention
        attention.backend.quantize_cache(
            head_scales(*(_heads_of_rank(model, each) for each in (keys, values)))
        )


def _is_first(model: CausalLM) -> bool:
    return model.context.tp.rank == 0 and model.stage.is_first


def _heads_of_rank(model: CausalLM, scales: tuple[float, ...]) -> Tensor:
    """The scales of the key-value heads of this rank."""
    config, tp = model.config, model.context.tp
    heads = config.num_attention_heads, config.num_key_value_heads
    mine = partition_heads(*heads, tp.rank, tp.size).keys
    whole = scales * (config.num_key_value_heads // len(scales))
    # A rank may have room for more heads than it holds.
    padding = (1.0,) * (mine.size - mine.count)
    ours = (*whole[mine.first : mine.first + mine.count], *padding)
    return torch.tensor(ours, dtype=torch.float32, device=model.device)


def _check_device(kind: str, device: torch.device, dtype: str) -> None:
    if kind != "fp8" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            "a KV cache of FP8 needs a GPU of compute capability 8.9, and this GPU has "
            f"{'.'.join(map(str, capability))}. Serve with --kv-cache-dtype {dtype}, or with "
            "int8 and calibrated scales."
        )
