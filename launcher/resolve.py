"""From flags and a model repository to the worker groups that serve it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterable, Sequence

from trimaran.comm.errors import ConfigError
from trimaran.launcher import settings
from trimaran.launcher.config import GroupConfig, ServeConfig
from trimaran.launcher.engine_args import engine_config, threads_of_a_rank
from trimaran.launcher.instances import Instance, instances_of
from trimaran.launcher.job import Job, own_address
from trimaran.server.model_repository import ModelRepository, RepositoryModel, Role


class PlacementConflict(ConfigError):
    """There is no room beside running groups; there would be if ``groups`` ended first."""

    def __init__(self, text: str, groups: tuple[str, ...]) -> None:
        super().__init__(text)
        self.groups = groups


def group_name(model: str, instance: int, generation: int) -> str:
    """The name of a worker group: ``model``, ``model#1``, ``model@2`` or ``model#1@2``."""
    suffix = f"#{instance}" if instance else ""
    return f"{model}{suffix}" + (f"@{generation}" if generation > 1 else "")


class Resolver:
    """Turns models into groups, at the start and for loads while serving.

    Holds the flags and nothing that changes: equal questions have equal answers as long as
    the files are the same. Reads configurations, never weights.
    """

    def __init__(self, args: argparse.Namespace, job: Job | None = None) -> None:
        """``job`` is the MPI job that this process is the first task of, if any.

        Raises:
            ConfigError: flags that do not go together.
        """
        settings.check_flags(args)
        self._args = args
        self._job = job
        self._flags = settings.engine_flags(args)
        self._launch = "none" if args.no_mpi else "job" if job is not None else "mpirun"

    def initial(self) -> ServeConfig:
        """The configuration to start with.

        Raises:
            ConfigError: the operator must change something.
        """
        args, job = self._args, self._job
        repository = ModelRepository.load(args.model_repo)
        groups: tuple[GroupConfig, ...] = ()
        for model in self._token_models(repository):
            groups += self._groups(model, 1)
        groups = self._placed(groups, ())
        return ServeConfig(
            frontend=settings.frontend_config(args, _names_by_model(groups)),
            groups=groups,
            mpi=settings.mpi_config(args, job),
            advertise_address=args.advertise_address or _own_address(job),
            restart=settings.restart_policy(args, job),
            log=settings.log_config(args),
            hang_timeout_s=args.hang_timeout,
            exit_timeout_s=args.exit_timeout,
            connect_timeout_s=args.connect_timeout,
            startup_timeout_s=args.startup_timeout,
            ensemble=_text_model(repository),
            notes=settings.notes(args),
        )

    def groups_of(
        self, model: RepositoryModel, generation: int, running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        """The groups that serve ``model``, beside those that run already.

        Raises:
            PlacementConflict: only running groups are in the way.
            ConfigError: the model cannot be served here.
        """
        if self._job is not None:
            raise ConfigError(
                f"model '{model.name}' needs ranks of its own, but this server runs inside an "
                "MPI job whose ranks are all taken. Start the server outside of the job."
            )
        others = sorted({group.model for group in running} - {model.name})
        if others and not self._args.multi_model:
            raise ConfigError(
                f"model '{model.name}' cannot be served beside '{others[0]}': this server "
                "runs one token-level model. Start it with --multi-model."
            )
        return self._placed(self._groups(model, generation), running)

    # ---- groups -------------------------------------------------------------------------

    def _groups(self, model: RepositoryModel, generation: int) -> tuple[GroupConfig, ...]:
        """The groups of one model, not yet placed."""
        return tuple(
            self._group(model, instance, generation) for instance in instances_of(model)
        )

    def _group(
        self, model: RepositoryModel, instance: Instance, generation: int
    ) -> GroupConfig:
        named = instance.participants or instance.devices
        engine = engine_config(model, self._flags, len(named))
        if instance.devices and len(instance.devices) != engine.parallel.world_size:
            raise ConfigError(
                f"{model.config_path}: gpu_device_ids is {','.join(instance.devices)!r}: "
                f"{len(instance.devices)} GPUs for a world size of "
                f"{engine.parallel.world_size}. Name one a rank."
            )
        period_ms = model.parameters.get_int("stats_check_period_ms")
        engine = dataclasses.replace(
            engine, gpu_device_ids=tuple(int(device) for device in instance.devices)
        )
        group = GroupConfig(
            name=group_name(model.name, instance.number, generation),
            model=model.name,
            engine=engine,
            stats_period_ms=100 if period_ms is None else max(1, period_ms),
            instance=instance.number,
            generation=generation,
            launch=self._launch,
        )
        if self._job is not None and self._job.size != group.world_size:
            raise ConfigError(
                f"this MPI job has {self._job.size} tasks but {engine.engine_dir} runs on "
                f"{group.world_size} ranks. Start the job with that many tasks."
            )
        return group

    def _placed(
        self, groups: Sequence[GroupConfig], running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        """The groups with their hosts, devices and share of the cores."""
        num_ranks = sum(group.world_size for group in (*groups, *running))
        return tuple(self._with_threads(group, num_ranks) for group in groups)

    def _with_threads(self, group: GroupConfig, num_ranks: int) -> GroupConfig:
        if self._flags.num_threads is not None:
            return group
        threads = threads_of_a_rank(group.engine.device, num_ranks)
        return dataclasses.replace(
            group, engine=dataclasses.replace(group.engine, num_threads=threads)
        )

    # ---- models -------------------------------------------------------------------------

    def _token_models(self, repository: ModelRepository) -> list[RepositoryModel]:
        """The token-level models to start with."""
        found = {model.name: model for model in repository.of_role(Role.TOKEN)}
        names = self._args.tensorrt_llm_model_name
        if names is None:
            chosen = list(found)
        else:
            chosen = [name.strip() for name in names.split(",") if name.strip()]
        for name in chosen:
            if name not in found:
                raise ConfigError(
                    f"--tensorrt-llm-model-name {name}: no token-level model of that name. The "
                    f"repository holds {', '.join(sorted(found)) or 'none'}."
                )
        if not found:
            raise ConfigError(
                "the model repository holds no token-level model (tensorrt_llm). Write one "
                "with `trimaran init-repo`."
            )
        if not self._args.multi_model and len(chosen) != 1:
            where = "--tensorrt-llm-model-name names" if names else "the model repository holds"
            raise ConfigError(
                f"{where} {len(chosen)} token-level models ({', '.join(sorted(chosen))}) and a "
                "server runs one. Serve them all with --multi-model, or choose one with "
                "--tensorrt-llm-model-name."
            )
        return [found[name] for name in chosen]


def _names_by_model(groups: Iterable[GroupConfig]) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for group in groups:
        names[group.model] = (*names.get(group.model, ()), group.name)
    return names


def _text_model(repository: ModelRepository) -> str:
    """The model that the example request names: an ensemble, else the BLS model."""
    for role in (Role.ENSEMBLE, Role.BLS):
        for model in repository.of_role(role):
            return model.name
    return ""


def _own_address(job: Job | None) -> str:
    """Where other hosts reach us, if some of the ranks will be on other hosts."""
    is_one_host = job.is_one_host if job else os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
    return "" if is_one_host else own_address()
