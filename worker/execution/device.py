"""Selects the device of a rank."""

from __future__ import annotations

import torch

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig


def select_device(config: EngineConfig, topology: ParallelLayout) -> torch.device:
    """The device of this rank: one GPU each, by ``gpu_device_ids`` or by local rank.

    Raises:
        ConfigError: the host has no GPUs or too few.
    """
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device is {config.device!r} but must be auto, cpu or cuda")
    count = torch.cuda.device_count()
    ids, position = config.gpu_device_ids, topology.rank
    if not ids:
        ids, position = tuple(range(count)), topology.local_rank
    if position >= len(ids):
        raise ConfigError(
            f"{len(topology.local_ranks)} ranks share this host but only GPUs {list(ids)} "
            "are given to them; each rank needs one of its own. Lower the world size, name "
            "more in gpu_device_ids, or serve on the CPU (--device cpu)."
        )
    index = ids[position]
    if index >= count:
        raise ConfigError(
            f"gpu_device_ids names GPU {index} but this host shows {count} GPU(s) "
            "(CUDA_VISIBLE_DEVICES hides others)"
        )
    return torch.device("cuda", index)
