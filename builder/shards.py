"""Writes one weight file a rank, with the engine's own models and weight loader."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trimaran.builder.config_file import ShardTable
from trimaran.builder.progress import ProgressBar
from trimaran.comm.topology import ParallelLayout
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.engine_folder import EngineFolder, RankMapping, shard_path
from trimaran.worker.layers.linear import LayerContext
from trimaran.worker.layers.parallel import ShardPosition
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import MODELS, dtype_by_name
from trimaran.worker.models.weight_loader import load_checkpoint
from trimaran.worker.pretrained_config import PretrainedConfig


def write_shards(
    source: EngineFolder, config: PretrainedConfig, mapping: RankMapping, output: Path
) -> ShardTable:
    """Cut a Hugging Face folder's weights for every rank; returns the table of files.

    One rank's weights are in memory at a time, in ``config.dtype``.
    """
    steps = mapping.world_size * (len(source.weight_files) + 1)
    entries: ShardTable = []
    with ProgressBar(steps) as progress:
        for rank in range(mapping.world_size):

            def reading(name: str, rank: int = rank) -> None:
                progress.step(f"rank {rank} of {mapping.world_size}: reading {name}")

            layout = ParallelLayout(
                rank=rank,
                tp_size=mapping.tp_size,
                pp_size=mapping.pp_size,
                dp_size=mapping.dp_size,
            )
            model = _empty_model(config, layout, mapping.moe_ep_size)
            load_checkpoint(model, source.weight_files, progress=reading)
            path = shard_path(output, rank)
            progress.step(f"rank {rank} of {mapping.world_size}: writing {path.name}")
            _save(dict(model.named_parameters()), path)
            entries.append(_entry(path))
    return entries


def take_shards(source: EngineFolder, output: Path) -> ShardTable:
    """Put a checkpoint folder's files into ``output``; returns the table of files.

    They are linked where the file system can, so that no weight is on disk twice.
    """
    entries: ShardTable = []
    with ProgressBar(len(source.weight_files)) as progress:
        for path in source.weight_files:
            progress.step(f"taking {path.name}")
            target = output / path.name
            try:
                target.hardlink_to(path)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)
            entries.append(_entry(target))
    return entries


def _empty_model(
    config: PretrainedConfig, layout: ParallelLayout, moe_ep_size: int
) -> CausalLM:
    """A rank's model without contents; it is only filled and saved, so plain operators do."""
    dtype = dtype_by_name(config.dtype)
    tp = ShardPosition(layout.tp_rank, layout.tp_size)
    device = torch.device("cpu")
    context = LayerContext(tp, TorchOps(), dtype, device, moe_ep_size=moe_ep_size)
    stage = StageRange.of(config.num_hidden_layers, layout.pp_rank, layout.pp_size)
    return MODELS[config.architecture](config, stage, context)


def _save(parameters: dict[str, torch.nn.Parameter], path: Path) -> None:
    tensors: dict[str, Tensor] = {name: each.data for name, each in parameters.items()}
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from None
    # safetensors makes files that only their owner may read.
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _entry(path: Path) -> dict[str, str | int]:
    return {"file": path.name, "bytes": path.stat().st_size}
