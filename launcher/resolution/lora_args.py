"""From a token-level model's config.pbtxt to how its engine keeps LoRA adapters."""

from __future__ import annotations

import os

from trimaran.comm.errors import ConfigError
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind


def lora_config(
    model: RepositoryModel, folder: EngineFolder, *, has_graphs: bool
) -> LoraConfig:
    """The caches of adapters, whose sizes a folder that was built limits.

    Raises:
        ConfigError: the folder of adapters is none, or a size is over the engine's limit.
    """
    values, usual = model.parameters, LoraConfig()
    largest = values.get_int("lora_cache_max_adapter_size")
    fraction = values.get_float("lora_cache_gpu_memory_fraction")
    host_bytes = values.get_int("lora_cache_host_memory_bytes")
    adapters = values.get_str("lora_prefetch_dir") or ""
    limit = folder.build.max_lora_rank
    if largest is not None and largest > limit and folder.kind is FolderKind.ENGINE:
        raise ConfigError(
            f"{model.folder}/config.pbtxt: lora_cache_max_adapter_size is {largest}, but the "
            f"engine folder is built for adapters of size {limit} at most. Lower it, or "
            f"build again with --max-lora-rank {largest}."
        )
    if adapters and not os.path.isdir(adapters):
        raise ConfigError(
            f"{model.folder}/config.pbtxt: lora_prefetch_dir is {adapters!r}, which is no "
            "folder. Name the folder that holds a subfolder for each adapter."
        )
    return LoraConfig(
        max_adapter_size=largest or limit,
        gpu_memory_fraction=usual.gpu_memory_fraction if fraction is None else fraction,
        host_memory_bytes=usual.host_memory_bytes if host_bytes is None else host_bytes,
        prefetch_dir=os.path.abspath(adapters) if adapters else "",
        has_graphs=has_graphs,
    )
