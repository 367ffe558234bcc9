"""What the supervisor starts: the commands, environments and configurations of each group."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from typing import Any

from trimaran.comm.env import ChildEnv
from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import GroupConfig, ServeConfig
from trimaran.launcher.group import GroupSpec
from trimaran.launcher.job import rank_environ
from trimaran.launcher.mpi_launch import Mpi, compose, num_slots, starter_env
from trimaran.worker.config import RankConfig


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands of the front end and of a rank."""

    frontend: tuple[str, ...]
    rank: tuple[str, ...]

    @classmethod
    def installed(cls) -> Programs:
        """The console scripts beside this interpreter.

        Raises:
            ConfigError: the package is not installed there.
        """
        return cls((_script("trimaran-frontend"),), (_script("trimaran-rank"),))


def frontend_spec(
    config: ServeConfig, programs: Programs, secret: tuple[str, str]
) -> GroupSpec:
    """The front end; ``secret`` is the supervisor's address and the run's token."""
    env = {
        **starter_env(os.environ),
        **_child_env(config, secret, ""),
        # The front end forks for conversions only; tokenizers' own threads stay.
        "TOKENIZERS_PARALLELISM": "false",
    }
    wire = config.frontend.to_wire()
    return GroupSpec(
        role="frontend",
        name="frontend",
        world_size=1,
        command=programs.frontend,
        env=env,
        make_config=lambda incarnation: wire,
        connect_timeout_s=config.connect_timeout_s,
        startup_timeout_s=config.startup_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
    )


def worker_spec(
    config: ServeConfig,
    group: GroupConfig,
    mpi: Mpi | None,
    programs: Programs,
    secret: tuple[str, str],
) -> GroupSpec:
    """One engine's ranks; ``secret`` as for `frontend_spec`."""
    ours = {
        **_child_env(config, secret, group.name),
        "OMP_NUM_THREADS": str(group.engine.num_threads),
    }
    is_job = config.mpi.kind == "job"
    start_method = "job" if is_job else "singleton" if mpi is None else "mpirun"
    command = list(programs.rank)
    if mpi is not None:
        command = compose(
            mpi,
            group.world_size,
            command,
            forward=sorted(ours),
            oversubscribe=_needs_oversubscribe(config, group.world_size),
        )
    base = rank_environ(os.environ) if is_job else starter_env(os.environ)

    def make_config(incarnation: int) -> dict[str, Any]:
        return RankConfig(
            engine=group.engine,
            group=group.name,
            incarnation=incarnation,
            frontends=config.frontend.engine_listen[:1],
            start_method=start_method,
            hang_timeout_s=config.hang_timeout_s,
            start_timeout_s=config.startup_timeout_s,
            stats_period_ms=group.stats_period_ms,
        ).to_wire()

    return GroupSpec(
        role="rank",
        name=group.name,
        world_size=group.world_size,
        command=command,
        env={**base, **ours},
        make_config=make_config,
        mpi=mpi,
        inherit_fds=is_job,
        connect_timeout_s=config.connect_timeout_s,
        startup_timeout_s=config.startup_timeout_s,
        hang_timeout_s=config.hang_timeout_s,
    )


def _child_env(config: ServeConfig, secret: tuple[str, str], group: str) -> dict[str, str]:
    address, token = secret
    child = ChildEnv(
        supervisor=address,
        token=token,
        group=group,
        log_format=config.log.format,
        log_level=config.log.level,
    )
    return {**child.to_environ(), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _needs_oversubscribe(config: ServeConfig, world_size: int) -> bool:
    if config.mpi.oversubscribe:
        return True
    # An allocation knows its own slots, on hosts that cannot be counted from here.
    return "SLURM_JOB_ID" not in os.environ and world_size > num_slots()


def _script(name: str) -> str:
    path = shutil.which(name, path=sysconfig.get_path("scripts"))
    if path is None:
        raise ConfigError(
            f"the program {name} is not installed beside this Python. Install the package: "
            "pip install -e ."
        )
    return path
