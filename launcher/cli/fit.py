"""The memory that a model needs with each quantization, for `trimaran doctor`."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.kv_cache_dtype import ALGORITHMS
from trimaran.worker.config.quantization import LOAD_METHODS
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.parallel.tensor_parallel import ShardPosition

_META = torch.device("meta")
_TOKENS = 1000
_GB, _MB = 1e9, 1e6


def memory_lines(engine: EngineConfig) -> list[str]:
    """What weights and KV cache of a whole model take, all ranks together, and for how many
    tokens this machine's memory has room.

    Each quantization of weights that can still be chosen has a part, and each dtype of the
    KV cache. On a CPU weights in FP8 are kept in bfloat16.

    Raises:
        ConfigError: the folder cannot be loaded.
    """
    folder = EngineFolder.load(engine.engine_dir, check_weights=False)
    floats = folder.config.dtype if engine.dtype == "auto" else engine.dtype
    models = dict(_models(folder, engine, floats))
    weights = {name: _weight_bytes(model, engine.device) for name, model in models.items()}
    first = next(iter(models.values()))
    cache = sum(spec.token_bytes for spec in first.kv_cache_specs())
    caches = {floats: cache}
    if not folder.config.kv_lora_rank:
        small = cache // dtype_by_name(floats).itemsize
        caches |= dict.fromkeys(ALGORITHMS, small)
    lines = [
        "weights: " + _listed(weights, _GB, "GB"),
        f"KV cache of {_TOKENS} tokens: "
        + _listed({name: _TOKENS * size for name, size in caches.items()}, _MB, "MB"),
    ]
    lines += _room(engine.device, weights, caches)
    return lines


def _models(
    folder: EngineFolder, engine: EngineConfig, floats: str
) -> Iterator[tuple[str, CausalLM]]:
    """The model without data, by the name of its quantization; the one that would be served
    comes first."""
    quantization = folder.config.quantization
    is_quantized = quantization is not None and bool(quantization.rules)
    served = quantization.method if quantization is not None and is_quantized else floats
    names = [engine.quantization]
    if folder.kind is FolderKind.HUGGINGFACE and not is_quantized:
        names += [name for name in ("none", *LOAD_METHODS) if name != engine.quantization]
    for name in names:
        try:
            config = folder.quantized(name).config
            stage = StageRange.of(config.num_hidden_layers, 0, 1)
            model = build_model(
                config, stage, ShardPosition(), dtype=dtype_by_name(floats), device=_META
            )
        except ConfigError:
            if name == engine.quantization:
                raise
            # Not every model takes every quantization.
            continue
        yield (served if name == "none" else name), model


def _weight_bytes(model: CausalLM, device: str) -> int:
    parameters = list(model.parameters())
    total = sum(each.nbytes for each in parameters)
    if device == "cpu":
        total += sum(each.nbytes for each in parameters if each.dtype == torch.float8_e4m3fn)
    return total


def _room(device: str, weights: dict[str, int], caches: dict[str, int]) -> Iterator[str]:
    """Tokens beside the weights, without what steps need."""
    if device == "cpu":
        memory, place = psutil.virtual_memory().available, "memory that is free now"
    elif torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
        place = "one GPU of this machine"
    else:
        return
    yield f"room in {memory / _GB:.1f} GB ({place}), without what steps need:"
    for name, size in weights.items():
        if size >= memory:
            yield f"  weights in {name} do not fit"
            continue
        tokens = {each: (memory - size) // cache for each, cache in caches.items()}
        found = ", ".join(f"{count} tokens in {each}" for each, count in tokens.items())
        yield f"  {name}: {found}"


def _listed(sizes: dict[str, int], unit: float, word: str) -> str:
    return ", ".join(f"{name} {size / unit:.3g} {word}" for name, size in sizes.items())
