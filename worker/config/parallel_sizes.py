"""The parallel layout that follows from flags and a folder; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import ParallelConfig
from trimaran.worker.config.engine_folder import EngineFolder, RankMapping
from trimaran.worker.config.stages import stage_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSizes:
    """The sizes given by flags; 0 for a size left out, or -1 for the two sizes of experts."""

    world_size: int = 0
    tp_size: int = 0
    pp_size: int = 0
    dp_size: int = 0
    moe_tp_size: int = -1
    moe_ep_size: int = -1
    pp_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty for an even split."""

    @property
    def names_axes(self) -> bool:
        """Whether a flag names an axis other than the experts' axes."""
        return bool(self.tp_size or self.pp_size or self.dp_size or self.pp_partition)

    @property
    def names_experts(self) -> bool:
        """Whether a flag names one of the experts' sizes."""
        return (self.moe_tp_size, self.moe_ep_size) != (-1, -1)


def layout_of(
    requested: RequestedSizes, folder: EngineFolder, num_named: int = 0
) -> ParallelConfig:
    """The layout in which ``folder`` runs: sizes of the flags, or sizes of the folder's shards.

    ``num_named`` is the number of devices or ranks that flags list, which a Hugging Face
    folder takes as its world size.

    Raises:
        ConfigError: these sizes make no layout, or the folder's shards have another layout.
    """
    built_for = folder.mapping
    if built_for is None:
        layout = _free_layout(requested, num_named)
    else:
        layout = _built_layout(requested, folder, built_for)
    # Check the folder's sizes first: correcting the product would not help.
    folder.check_parallel(
        layout.tp_size, layout.pp_size, layout.expert_parts, layout.expert_dp_size
    )
    _check_world_size(layout, requested.world_size)
    _check_stages(requested.pp_partition, layout, folder)
    return layout


def _free_layout(requested: RequestedSizes, num_named: int) -> ParallelConfig:
    """Layout of a folder that is sharded while loading: the tensor axis takes the remaining
    ranks.
    """
    pp_size, dp_size = (
        requested.pp_size or len(requested.pp_partition) or 1,
        requested.dp_size or 1,
    )
    others = pp_size * dp_size
    world_size = requested.world_size or num_named
    if not requested.tp_size and world_size % others:
        raise ConfigError(
            f"a world size of {world_size} is no multiple of --pp-size ({pp_size}) times "
            f"--dp-size ({dp_size}). Correct one of them, or name --tp-size."
        )
    tp_size = requested.tp_size or world_size // others or 1
    sizes = expert_sizes(requested.moe_tp_size, requested.moe_ep_size, tp_size, dp_size)
    return ParallelConfig(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
        moe_tp_size=sizes[0],
        moe_ep_size=sizes[1],
        pp_partition=requested.pp_partition,
    )


def _built_layout(
    requested: RequestedSizes, folder: EngineFolder, built_for: RankMapping
) -> ParallelConfig:
    """Layout of a folder with one shard a rank: only data-parallel ranks can be added."""
    tp_size, pp_size = (
        requested.tp_size or built_for.tp_size,
        requested.pp_size or built_for.pp_size,
    )
    if (
        requested.world_size
        and not requested.names_axes
        and requested.world_size != built_for.world_size
    ):
        # A world size alone means tensor parallelism over all ranks.
        folder.check_parallel(requested.world_size, 1)
    dp_size = requested.dp_size or built_for.dp_size
    if built_for.dp_size not in (1, dp_size):
        raise ConfigError(
            f"{folder.path}: built for experts shared over {built_for.dp_size} dp rank(s), but "
            f"asked to run with dp_size {dp_size}. Serve it with --dp-size "
            f"{built_for.dp_size}, or build again with --dp-size {dp_size}."
        )
    sizes = built_for.moe_tp_size, built_for.moe_ep_size
    if requested.names_experts:
        sizes = expert_sizes(requested.moe_tp_size, requested.moe_ep_size, tp_size, dp_size)
    return ParallelConfig(
        tp_size=tp_size,
        pp_size=pp_size,
        dp_size=dp_size,
        moe_tp_size=sizes[0],
        moe_ep_size=sizes[1],
        pp_partition=built_for.pp_partition,
    )


def _check_stages(
    requested: tuple[int, ...], layout: ParallelConfig, folder: EngineFolder
) -> None:
    sizes = stage_sizes(folder.config.num_hidden_layers, layout.pp_size, layout.pp_partition)
    if requested and list(requested) != sizes:
        shown = ",".join(map(str, requested))
        raise ConfigError(
            f"{folder.path}: built for stages of {','.join(map(str, sizes))} layers, but asked "
            f"to run with {shown}. Leave --pp-partition out, or build again with "
            f"--pp-partition {shown}."
        )


def _check_world_size(layout: ParallelConfig, requested: int) -> None:
    if requested and requested != layout.world_size:
        raise ConfigError(
            f"--world-size is {requested} but tp_size ({layout.tp_size}) times pp_size "
            f"({layout.pp_size}) times dp_size ({layout.dp_size}) is {layout.world_size}. "
            "Leave --world-size out, or correct one of the sizes."
        )


def expert_sizes(
    moe_tp_size: int, moe_ep_size: int, tp_size: int, dp_size: int = 1
) -> tuple[int, int]:
    """Ranks that shard each expert, and parts that the experts are distributed to.

    -1 stands for the rest. The product is ``tp_size``, or ``tp_size * dp_size`` if
    data-parallel ranks share the experts; a rest completes ``tp_size`` if possible.

    Raises:
        ConfigError: the product is neither of the two.
    """
    if moe_tp_size == -1 and moe_ep_size == -1:
        return tp_size, 1
    if min(moe_tp_size, moe_ep_size) < -1 or 0 in (moe_tp_size, moe_ep_size):
        raise ConfigError(
            f"--moe-tp-size is {moe_tp_size} and --moe-ep-size is {moe_ep_size}, but each must "
            "be 1 or more, or -1 for what the tensor-parallel size leaves."
        )
    for num_ranks in (tp_size, tp_size * dp_size):
        cut = num_ranks // moe_ep_size if moe_tp_size == -1 else moe_tp_size
        shared = num_ranks // moe_tp_size if moe_ep_size == -1 else moe_ep_size
        if cut * shared == num_ranks:
            return cut, shared
    sizes = {"--moe-tp-size": moe_tp_size, "--moe-ep-size": moe_ep_size}
    named = [f"{flag} ({size})" for flag, size in sizes.items() if size != -1]
    or_dp_size = f", or that times --dp-size ({tp_size * dp_size})" if dp_size > 1 else ""
    raise ConfigError(
        f"{' times '.join(named)} must {'be' if len(named) > 1 else 'divide'} --tp-size "
        f"({tp_size}){or_dp_size}. Leave {'both' if len(named) > 1 else 'it'} out, or "
        "correct one."
    )
