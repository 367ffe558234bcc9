"""Runs a supervisor over the test's own child programs: settings come as JSON in argv."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.log import setup_logging
from trimaran.launcher.config import GroupConfig, LogConfig, RestartPolicy, ServeConfig
from trimaran.launcher.placement.group_placement import PlacementConflict
from trimaran.launcher.starters.mpi_launch import OPENMPI, Mpi
from trimaran.launcher.supervisor.group_specs import Programs
from trimaran.launcher.supervisor.supervisor import EXIT_CONFIG, supervise
from trimaran.server.config import FrontendConfig
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, ParallelConfig

HERE = Path(__file__).parent


class OneRankGroups:
    """Serves every model by a group of one rank; refuses models with certain names."""

    def groups_of(
        self, model: RepositoryModel, generation: int, running: Sequence[GroupConfig]
    ) -> tuple[GroupConfig, ...]:
        if model.name == "impossible":
            raise ConfigError("its engine has no layers")
        if model.name == "crowded":
            raise PlacementConflict("no room", tuple(group.name for group in running))
        name = model.name if generation == 1 else f"{model.name}@{generation}"
        group = group_of(model.name, name, generation)
        if model.name == "greedy":
            cache = CacheConfig(host_bytes=1 << 60)
            group = replace(group, engine=replace(group.engine, cache=cache))
        elif model.name == "unstartable":
            group = replace(group, launch="mpirun")
        elif model.name.startswith("spawned"):
            group = replace(group, launch="spawn")
        return (group,)


def group_of(model: str, name: str, generation: int = 1) -> GroupConfig:
    """A group of one rank without a starter's command line."""
    engine = EngineConfig(model=model, engine_dir="/nowhere")
    return GroupConfig(
        name=name, model=model, engine=engine, generation=generation, launch="none"
    )


def main(settings: dict[str, Any]) -> int:
    size = settings.pop("world_size", 1)
    starter = settings.pop("starter", "")
    orchestrator = settings.pop("orchestrator", "")
    engine = EngineConfig(
        model="m", engine_dir="/nowhere", parallel=ParallelConfig(tp_size=size)
    )
    others = tuple(group_of(name, name) for name in settings.pop("others", ()))
    config = ServeConfig(
        frontend=FrontendConfig(
            model_repository="/nowhere",
            groups={"m": ("m",)},
            num_frontends=settings.pop("num_frontends", 1),
        ),
        groups=(
            GroupConfig(
                name="m", model="m", engine=engine, launch="mpirun" if starter else "none"
            ),
            *others,
        ),
        restart=RestartPolicy(
            max_restarts=settings.pop("max_restarts", 2),
            first_delay_s=settings.pop("restart_delay_s", 0.05),
        ),
        log=LogConfig(file=settings.pop("log_file", "")),
        ensemble="ensemble",
        **settings,
    )
    child = (sys.executable, "-P", str(HERE / "child_program.py"))
    mpi = Mpi(starter or "/nowhere/mpirun", OPENMPI, "5.0")
    setup_logging("supervisor")
    spawner = (orchestrator,) if orchestrator else (*child, "orchestrator")
    programs = Programs((*child, "frontend"), (*child, "rank"), spawner)
    try:
        return supervise(config, mpi, programs, OneRankGroups())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG


def run(settings: dict[str, Any]) -> None:
    """Become the supervisor of a new session."""
    os.setsid()
    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(main(settings))


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
