"""`trimaran serve`: flags in, a checked configuration out, the supervisor run."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from trimaran.comm.errors import ConfigError
from trimaran.comm.log import setup_logging
from trimaran.launcher import preflight
from trimaran.launcher.config import (
    GroupConfig,
    LogConfig,
    MpiConfig,
    RestartPolicy,
    ServeConfig,
)  # fmt: skip
from trimaran.launcher.engine_args import EngineFlags, engine_config
from trimaran.launcher.group_specs import Programs
from trimaran.launcher.job import Job, abort_job, become_rank, current_job, own_address
from trimaran.launcher.mpi_launch import check_library, find_mpi
from trimaran.launcher.serve_flags import DEFAULT_LOG_FILE, add_arguments
from trimaran.launcher.supervisor import EXIT_CONFIG, Supervisor
from trimaran.server.config import FrontendConfig
from trimaran.server.model_repository import ModelRepository, RepositoryModel, Role

__all__ = ["add_arguments", "resolve", "run"]

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "tritonserver": "the server is Trimaran's own",
    "multimodal_gpu0_cuda_mem_pool_bytes": "there is no CUDA memory pool in the front end",
    "pinned_memory_pool_byte_size": "there is no pinned memory pool in the front end",
    "cuda_memory_pool_byte_size": "there is no CUDA memory pool in the front end",
    "backend_config": "there are no loadable backends",
    "trtllm_llmapi_launch": "Trimaran starts its ranks itself",
    "disable_auto_complete_config": "configurations are never completed",
    "force": "servers on other ports never conflict",
}


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code.

    0 after a drain, 1 when serving failed, 2 when the configuration is at fault.
    """
    # What the repository accepts without effect is for the front end to say, once.
    setup_logging("supervisor", log_format=args.log_format, level="ERROR")
    job = _job(args)
    if job is not None and job.rank > 0:
        become_rank(Programs.installed().rank)
    try:
        config = resolve(args, job)
        setup_logging("supervisor", log_format=config.log.format, level=config.log.level)
        preflight.check(config)
        mpi = None
        if config.mpi.kind not in ("none", "job"):
            mpi = find_mpi(config.mpi)
            check_library(mpi)
        supervisor = Supervisor(config, mpi, Programs.installed())
    except ConfigError as error:
        if job is None:
            raise
        # Said before the abort, which may end this task too.
        print(f"trimaran: error: {error}", file=sys.stderr, flush=True)
        abort_job()
        return EXIT_CONFIG
    for note in config.notes:
        logger.info("%s", note)
    return supervisor.run()


def resolve(args: argparse.Namespace, job: Job | None = None) -> ServeConfig:
    """The configuration that these flags ask for; reads the repository and the engine.

    ``job`` is the MPI job that this process is the first task of, if any.

    Raises:
        ConfigError: the operator must change something.
    """
    _refuse(args)
    repository = ModelRepository.load(args.model_repo)
    model = _token_model(repository, args.tensorrt_llm_model_name)
    engine = engine_config(model, _engine_flags(args))
    period_ms = model.parameters.get_int("stats_check_period_ms")
    group = GroupConfig(
        name=model.name,
        model=model.name,
        engine=engine,
        stats_period_ms=100 if period_ms is None else max(1, period_ms),
    )
    if job is not None and job.size != group.world_size:
        raise ConfigError(
            f"this MPI job has {job.size} tasks but {engine.engine_dir} runs on "
            f"{group.world_size} ranks. Start the job with that many tasks."
        )
    return ServeConfig(
        frontend=_frontend(args, group),
        groups=(group,),
        mpi=MpiConfig(
            kind="none" if args.no_mpi else "job" if job is not None else args.mpi,
            mpirun=args.mpirun,
            oversubscribe=args.oversubscribe,
        ),
        advertise_address=args.advertise_address or _own_address(job),
        # Ranks of a job that somebody else started are not ours to start again.
        restart=RestartPolicy(
            max_restarts=args.max_restarts if args.restart == "on-failure" and not job else 0,
            window_s=args.restart_window,
        ),
        log=_log(args),
        hang_timeout_s=args.hang_timeout,
        exit_timeout_s=args.exit_timeout,
        connect_timeout_s=args.connect_timeout,
        startup_timeout_s=args.startup_timeout,
        ensemble=_text_model(repository),
        notes=tuple(
            f"--{name.replace('_', '-')} has no effect: {why}"
            for name, why in _WITHOUT_EFFECT.items()
            if getattr(args, name)
        ),
    )


def _job(args: argparse.Namespace) -> Job | None:
    """The MPI job to serve in, if we are in one and no other way was asked for."""
    if args.no_mpi or args.mpirun or args.mpi not in ("auto", "job"):
        return None
    job = current_job(os.environ)
    if job is None and args.mpi == "job":
        raise ConfigError(
            "--mpi job: this process is no task of an MPI job. Start it with mpirun or srun, "
            "one task a rank."
        )
    return job


def _own_address(job: Job | None) -> str:
    """Where other hosts reach us, if some of the ranks will be on other hosts."""
    is_one_host = job.is_one_host if job else os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
    return "" if is_one_host else own_address()


def _refuse(args: argparse.Namespace) -> None:
    """Flags that ask for what this version does not do."""
    if not args.model_repo:
        raise ConfigError("--model-repo DIR is missing: the model repository to serve")
    if args.multi_model or args.disable_spawn_processes:
        flag = "--multi-model" if args.multi_model else "--disable-spawn-processes"
        raise ConfigError(
            f"{flag} is not served: this version runs one token-level model a server. Start "
            "one server a model, each with --tensorrt-llm-model-name and ports of its own."
        )
    if args.model_control_mode != "none":
        raise ConfigError(
            f"--model-control-mode {args.model_control_mode} is not served: all models are "
            "loaded at start. Leave it out, or choose none."
        )
    if args.no_mpi and (args.mpirun or args.mpi != "auto"):
        raise ConfigError("--no-mpi goes together with neither --mpi nor --mpirun")
    if args.mpi == "job" and args.mpirun:
        raise ConfigError("--mpi job starts no mpirun of its own: leave out --mpirun")


def _token_model(repository: ModelRepository, names: str | None) -> RepositoryModel:
    """The one token-level model to serve."""
    found = {model.name: model for model in repository.of_role(Role.TOKEN)}
    if names is None:
        if len(found) == 1:
            return next(iter(found.values()))
        if not found:
            raise ConfigError(
                "the model repository holds no token-level model (tensorrt_llm). Write one "
                "with `trimaran init-repo`."
            )
        raise ConfigError(
            f"the model repository holds {len(found)} token-level models "
            f"({', '.join(sorted(found))}) and a server runs one. Choose it with "
            "--tensorrt-llm-model-name."
        )
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if len(wanted) != 1:
        raise ConfigError(
            f"--tensorrt-llm-model-name {names} names {len(wanted)} models and a server runs "
            "one. Start one server a model."
        )
    if wanted[0] not in found:
        raise ConfigError(
            f"--tensorrt-llm-model-name {wanted[0]}: no token-level model of that name. The "
            f"repository holds {', '.join(sorted(found)) or 'none'}."
        )
    return found[wanted[0]]


def _text_model(repository: ModelRepository) -> str:
    """The model that the example request names: an ensemble, else the BLS model."""
    for role in (Role.ENSEMBLE, Role.BLS):
        for model in repository.of_role(role):
            return model.name
    return ""


def _engine_flags(args: argparse.Namespace) -> EngineFlags:
    return EngineFlags(
        world_size=args.world_size,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        tokens_per_block=args.tokens_per_block,
        depth=args.depth,
        num_threads=args.num_threads,
        deterministic=args.deterministic,
    )


def _frontend(args: argparse.Namespace, group: GroupConfig) -> FrontendConfig:
    metrics_config = {}
    for setting in args.metrics_config:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metrics-config {setting!r} is not of the form KEY=VALUE")
        metrics_config[key] = value
    http_address = args.http_address or "0.0.0.0"
    return FrontendConfig(
        model_repository=os.path.abspath(args.model_repo),
        groups={group.model: (group.name,)},
        server_id=args.id,
        http_address=http_address,
        http_port=args.http_port,
        grpc_address=args.grpc_address or "0.0.0.0",
        grpc_port=args.grpc_port,
        metrics_address=args.metrics_address or http_address,
        metrics_port=args.metrics_port,
        allow_http=args.allow_http,
        allow_grpc=args.allow_grpc,
        allow_metrics=args.allow_metrics,
        http_max_input_bytes=args.http_max_input_size,
        exit_timeout_s=args.exit_timeout,
        replay_timeout_s=args.replay_timeout,
        max_replays=args.max_replays,
        strict_readiness=args.strict_readiness,
        model_control_mode=args.model_control_mode,
        log_verbose_level=max(args.log_verbose, 3 if args.log else 0),
        metrics_config=metrics_config,
    )


def _log(args: argparse.Namespace) -> LogConfig:
    is_verbose = args.log or args.log_verbose > 0
    return LogConfig(
        format=args.log_format,
        level="DEBUG" if is_verbose else "INFO",
        file=args.log_file or (DEFAULT_LOG_FILE if args.log else ""),
    )
