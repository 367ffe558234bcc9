"""From flags and a model repository to the worker groups that serve it."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import MAX_RANKS
from trimaran.launcher.config import GroupConfig, ServeConfig
from trimaran.launcher.placement.group_placement import (
    PendingGroup,
    PlacementConflict,
    needed_world_size,
    place_groups,
    place_participants,
    placements_of,
    show,
    show_ranks,
    with_devices,
    world_hosts,
)
from trimaran.launcher.placement.hosts import (
    allocated_hosts,
    is_this_host,
    named_hosts,
    this_host,
)
from trimaran.launcher.placement.job import Job, own_address
from trimaran.launcher.placement.launch_choice import Launch, choose_launch
from trimaran.launcher.placement.placement import Host
from trimaran.launcher.resolution import settings
from trimaran.launcher.resolution.engine_args import (
    engine_config,
    resolve_device,
    threads_of_a_rank,
)
from trimaran.launcher.resolution.models import Instance, instances_of, start_models
from trimaran.launcher.starters.mpi_launch import Mpi, find_mpi
from trimaran.server.repository.model_repository import RepositoryModel

logger = logging.getLogger(__name__)

__all__ = ["PlacementConflict", "Resolver", "group_name"]


def group_name(model: str, instance: int, generation: int) -> str:
    """The name of a worker group: ``model``, ``model#1``, ``model@2`` or ``model#1@2``."""
    suffix = f"#{instance}" if instance else ""
    return f"{model}{suffix}" + (f"@{generation}" if generation > 1 else "")


class Resolver:
    """Turns models into groups, at the start and for loads while serving.

    Holds the flags and no state: results depend on the arguments and the files alone. Reads
    configurations, never weights.
    """

    def __init__(self, args: argparse.Namespace, job: Job | None = None) -> None:
        """``job`` is the MPI job that this process is the first task of, if any.

        Raises:
            ConfigError: flags contradict each other.
        """
        settings.check_flags(args, job)
        self._args = args
        self._job = job
        self._flags = settings.engine_flags(args)
        self._device = resolve_device(args.device)
        self._named_hosts = named_hosts(args, self._device)
        self.launch: Launch = choose_launch(args, job, self._named_hosts, lambda: self.mpi)

    @cached_property
    def mpi(self) -> Mpi:
        """The MPI that starts groups.

        Raises:
            ConfigError: no MPI is found.
        """
        return find_mpi(settings.mpi_config(self._args, self._job))

    @property
    def needs_mpi(self) -> bool:
        """Whether this server starts groups by mpirun, or spawns them."""
        return self._job is None and self.launch.kind in ("mpirun", "spawn", "prestarted")

    def initial(self) -> ServeConfig:
        """The configuration to start with.

        Raises:
            ConfigError: the operator must change the configuration.
        """
        args, job = self._args, self._job
        models = start_models(args)
        pending = [entry for model in models.token for entry in self._pending(model, 1)]
        groups = self._placed(pending, ())
        is_prestarted = self.launch.kind == "prestarted"
        world_size = self._world_size(pending) if is_prestarted else 0
        return ServeConfig(
            frontend=settings.frontend_config(args, _names_by_model(groups)),
            groups=groups,
            world_size=world_size,
            world_hosts=world_hosts(world_size, self._named_hosts) if is_prestarted else (),
            mpi=settings.mpi_config(args, job),
            advertise_address=args.advertise_address or self._own_address(),
            restart=settings.restart_policy(args, job),
            log=settings.log_config(args),
            ready_file=settings.ready_file(args),
            hang_timeout_s=args.hang_timeout,
            stall_timeout_s=settings.stall_timeout_s(args),
            exit_timeout_s=args.exit_timeout,
            connect_timeout_s=args.connect_timeout,
            startup_timeout_s=args.startup_timeout,
            profile=settings.profile_config(args),
            ensemble=models.text,
            tokenizers=models.tokenizers,
            example_prompt=settings.example_prompt(args),
            notes=(*settings.notes(args), *self._notes(models.token)),
            picture=self.picture(groups),
        )

    def groups_of(
        self, model: RepositoryModel, generation: int, running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        """The groups that serve ``model``, beside the running ones.

        Raises:
            PlacementConflict: only running groups are in the way.
            ConfigError: the model cannot be served here.
        """
        if self.launch.kind in ("job", "prestarted"):
            raise ConfigError(
                f"model '{model.name}' needs ranks of its own, but all ranks of this server "
                f"started with it ({self.launch.why}). Start the server again to load it."
            )
        others = sorted({group.model for group in running} - {model.name})
        if others and not self._args.multi_model:
            raise ConfigError(
                f"model '{model.name}' cannot be served beside '{others[0]}': this server "
                "runs one token-level model. Start it with --multi-model."
            )
        groups = self._placed(self._pending(model, generation), running)
        for line in self.picture((*running, *groups)).splitlines():
            logger.info("%s", line)
        return groups

    def picture(self, groups: Sequence[GroupConfig]) -> str:
        """The placement of these groups, as lines of text."""
        if self.launch.kind == "prestarted":
            pending = [PendingGroup(group) for group in groups]
            return show_ranks(groups, self._world_size(pending))
        return show(self._hosts, groups) if self._chooses_hosts else ""

    # ---- groups -------------------------------------------------------------------------

    def _pending(self, model: RepositoryModel, generation: int) -> list[PendingGroup]:
        """The groups of one model, not placed yet."""
        num_nodes = model.parameters.get_int("num_nodes") or 1
        return [
            PendingGroup(
                self._group(model, instance, generation),
                instance.devices,
                # In leader mode the ranks fill the hosts in order, as mpirun does.
                num_nodes if self._args.multi_model else 0,
            )
            for instance in instances_of(model, needs_devices=self._device == "cuda")
        ]

    def _group(
        self, model: RepositoryModel, instance: Instance, generation: int
    ) -> GroupConfig:
        is_prestarted = self.launch.kind == "prestarted"
        participants = instance.participants if is_prestarted else ()
        engine = engine_config(model, self._flags, len(participants or instance.devices))
        world_size = engine.parallel.world_size
        if instance.devices and len(instance.devices) != world_size:
            raise ConfigError(
                f"{model.config_path}: gpu_device_ids is {','.join(instance.devices)!r}: "
                f"{len(instance.devices)} GPUs for a world size of {world_size}. Name one a "
                "rank."
            )
        self._check_world_size(world_size, engine.engine_dir)
        if self._args.routing == "prefix_aware" and not engine.cache.enable_block_reuse:
            raise ConfigError(
                f"{model.config_path}: enable_kv_cache_reuse is false, so that an engine keeps "
                "nothing of a prompt and --routing prefix_aware cannot take effect. Set it to "
                "true, or use --routing auto."
            )
        period_ms = model.parameters.get_int("stats_check_period_ms")
        return GroupConfig(
            name=group_name(model.name, instance.number, generation),
            model=model.name,
            engine=engine,
            stats_period_ms=100 if period_ms is None else max(1, period_ms),
            instance=instance.number,
            generation=generation,
            launch=self.launch.kind,
            participants=participants,
        )

    def _check_world_size(self, world_size: int, engine_dir: str) -> None:
        if self.launch.kind == "none" and world_size != 1:
            raise ConfigError(
                f"world size must be 1 when using no-mpi, but is {world_size}. Leave out "
                "--no-mpi, or serve an engine built for one rank."
            )
        if self.launch.kind == "job" and self._job and self._job.size != world_size:
            raise ConfigError(
                f"this MPI job has {self._job.size} tasks but {engine_dir} runs on "
                f"{world_size} ranks. Start the job with that many tasks."
            )

    def _placed(
        self, pending: Sequence[PendingGroup], running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        """The groups with their hosts, devices and share of the cores."""
        _check_num_ranks([*(entry.group for entry in pending), *running])
        if self.launch.kind == "job" and len(pending) > 1:
            names = ", ".join(entry.group.name for entry in pending)
            raise ConfigError(
                f"{len(pending)} groups ({names}) cannot "
                "share the ranks of this MPI job. Serve one instance, or add --multi-model "
                "--disable-spawn-processes and participant_ids."
            )
        if self.launch.kind == "prestarted":
            groups = place_participants(
                pending,
                self._world_size(pending),
                self._hosts,
                is_one_host=self._job.is_one_host if self._job else len(self._hosts) == 1,
            )
        elif not self._chooses_hosts:
            groups = [with_devices(entry.group, entry.devices) for entry in pending]
        else:
            groups = place_groups(pending, self._hosts, running)
        # An older generation of a model ends as soon as the new one serves.
        models = {group.model for group in groups}
        staying = [group for group in running if group.model not in models]
        ranks_on = Counter(placed.host for placed in placements_of((*groups, *staying)))
        return tuple(self._with_threads(group, ranks_on) for group in groups)

    def _with_threads(self, group: GroupConfig, ranks_on: Mapping[str, int]) -> GroupConfig:
        if self._flags.num_threads is not None:
            return group
        # Other hosts are assumed to have as many cores as this one.
        most = max(ranks_on[placed.host] for placed in placements_of([group]))
        threads = threads_of_a_rank(group.engine.device, most)
        return dataclasses.replace(
            group, engine=dataclasses.replace(group.engine, num_threads=threads)
        )

    # ---- placement ----------------------------------------------------------------------

    @cached_property
    def _hosts(self) -> tuple[Host, ...]:
        """The hosts for placement; this host alone if no others are known."""
        if self._named_hosts:
            return self._named_hosts
        allocated: tuple[Host, ...] = ()
        if self._args.multi_model and self._job is None:
            allocated = allocated_hosts(os.environ, self._device)
        return allocated or (this_host(self._device),)

    @property
    def _chooses_hosts(self) -> bool:
        """Whether ranks are placed here; else the job's starter or mpirun places them."""
        if self.launch.kind == "job":
            return False
        is_one_host = os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
        return self._args.multi_model or bool(self._named_hosts) or is_one_host

    def _world_size(self, pending: Sequence[PendingGroup]) -> int:
        """Ranks of the job that prestarted groups share."""
        if self._job is not None:
            return self._job.size
        return self._args.world_size or needed_world_size(pending)

    def _own_address(self) -> str:
        """The address for ranks of other hosts; empty if all ranks are on this host."""
        if self._job is not None:
            is_one_host = self._job.is_one_host
        elif self._named_hosts:
            is_one_host = all(is_this_host(host.name) for host in self._named_hosts)
        else:
            is_one_host = os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
        return "" if is_one_host else own_address()

    def _notes(self, models: Iterable[RepositoryModel]) -> list[str]:
        """The way of starting groups, and the models' keys without effect here."""
        found = []
        if self._args.multi_model:
            found.append(f"groups are started by {self.launch.kind}: {self.launch.why}")
        idle = {
            "gpu_device_ids": self._device == "cpu" and "ranks compute on the CPU",
            "participant_ids": self.launch.kind != "prestarted"
            and "it goes together with --disable-spawn-processes",
            "num_nodes": not self._args.multi_model and "it goes together with --multi-model",
        }
        for model in models:
            for key, why in idle.items():
                if why and model.parameters.get_str(key):
                    found.append(f"{model.config_path}: {key} has no effect: {why}")
        return found


def _check_num_ranks(groups: Sequence[GroupConfig]) -> None:
    num_ranks = sum(group.world_size for group in groups)
    if num_ranks > MAX_RANKS:
        raise ConfigError(
            f"{len(groups)} groups have {num_ranks} ranks in all, but a server has at most "
            f"{MAX_RANKS}. Serve fewer models or instances, or engines built for fewer ranks."
        )


def _names_by_model(groups: Iterable[GroupConfig]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for group in groups:
        names[group.model] = (*names.get(group.model, ()), group.name)
    return names
