"""The plan of a build: every rank's tensors by layer, and the checkpoint's tensors for each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimaran.builder.progress import ProgressBar
from trimaran.builder.shard_layout import ShardLayout
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_folder import EngineFolder, RankMapping, origin_of
from trimaran.worker.config.pretrained_config import PretrainedConfig
from trimaran.worker.models.interfaces import CausalLM, StageRange
from trimaran.worker.models.registry import build_model, dtype_by_name
from trimaran.worker.models.weights.checkpoint import StoredTensor, find_tensors
from trimaran.worker.models.weights.parts import Part, parts_of
from trimaran.worker.models.weights.tensor_reader import DTYPES
from trimaran.worker.models.weights.weight_loader import load_weight
from trimaran.worker.parallel.tensor_parallel import ExpertRanks, ShardPosition

_LAYER = re.compile(r"layers\.\d+")
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are made together: one layer for all ranks, or one tensor outside the
    layers."""

    name: str
    places: tuple[tuple[int, str], ...]
    """(rank, name) of each tensor."""

    num_bytes: int


class RankPlan:
    """One rank's tensors: their positions in its file, and the parts that fill them.

    The rank's model has shapes but no memory.
    """

    def __init__(
        self, model: CausalLM, found: dict[str, StoredTensor], origin: dict[str, Any]
    ) -> None:
        self.model = model
        self.parameters = dict(model.named_parameters())
        self.layout = ShardLayout(self.parameters, origin)
        self.parts: dict[str, list[Part]] = {name: [] for name in self.parameters}
        for part in parts_of(model, found):
            self.parts[part.target.parameter].append(part)
        for name, parts in self.parts.items():
            assert parts, f"no weight of the checkpoint goes into {name}"

    def check_shapes(self, checked: set[str]) -> None:
        """Load every part that is not among ``checked`` without its data, and add it to them.

        Raises:
            ConfigError: a tensor's shape differs from that in the configuration.
        """
        for name, parts in self.parts.items():
            for part in parts:
                made = f"{part.stored.name}, {part.conversion.value}"
                if made not in checked:
                    checked.add(made)
                    parameter = self.parameters[name]
                    whole = part.whole(_empty(part.stored), _empty, parameter.dtype)
                    load_weight(self.model, parameter, part.target, whole, part.stored)


class BuildPlan:
    """All ranks' plans, checked against the files' headers before any file is written.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """

    def __init__(
        self, source: EngineFolder, config: PretrainedConfig, mapping: RankMapping
    ) -> None:
        self.ranks: list[RankPlan] = []
        found: dict[str, StoredTensor] = {}
        checked: set[str] = set()
        origin = origin_of(config, mapping)
        with ProgressBar(mapping.world_size, counts_bytes=False) as progress:
            for number in range(mapping.world_size):
                progress.show(number, "laying out the ranks' files")
                model = model_on_meta(number, config, mapping)
                found = found or find_tensors(model, source.weight_files)
                rank = RankPlan(model, found, origin)
                rank.check_shapes(checked)
                self.ranks.append(rank)
        self.units = _units(self.ranks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(rank.layout.num_bytes for rank in self.ranks)

    @property
    def largest_tensor_bytes(self) -> int:
        """Bytes of the largest tensor of a rank, which is made in memory."""
        return max(each.nbytes for rank in self.ranks for each in rank.parameters.values())


def _empty(stored: StoredTensor) -> Tensor:
    """A tensor of this shape and dtype, without data; its reader refuses unknown dtypes."""
    dtype = DTYPES.get(stored.entry.dtype, torch.float32)
    return torch.empty(stored.entry.shape, dtype=dtype, device=_META)


def model_on_meta(rank: int, config: PretrainedConfig, mapping: RankMapping) -> CausalLM:
    layout = ParallelLayout(
        rank=rank,
        tp_size=mapping.tp_size,
        pp_size=mapping.pp_size,
        dp_size=mapping.dp_size,
    )
    place = ShardPosition(layout.stage_ranks.index(rank), len(layout.stage_ranks))
    stage = StageRange.of(
        config.num_hidden_layers, layout.pp_rank, layout.pp_size, mapping.pp_partition
    )
    return build_model(
        config,
        stage,
        ShardPosition(layout.tp_rank, layout.tp_size),
        dtype=dtype_by_name(config.dtype),
        device=_META,
        experts=ExpertRanks(mapping.moe_ep_size, place),
    )


def _units(ranks: Sequence[RankPlan]) -> list[Unit]:
    """All units, the largest first, so that the last ones to finish are short."""
    places: dict[str, list[tuple[int, str]]] = {}
    sizes: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        for name, parameter in rank.parameters.items():
            layer = _LAYER.match(name)
            unit = layer[0] if layer else name
            places.setdefault(unit, []).append((number, name))
            sizes[unit] = sizes.get(unit, 0) + parameter.nbytes
    units = [Unit(name, tuple(places[name]), sizes[name]) for name in places]
    return sorted(units, key=lambda unit: -unit.num_bytes)
