"""Checks the flags of `trimaran serve` alone, and turns them into configurations."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text, unreadable
from trimaran.comm.files.output_files import (
    check_replaceable,
    make_folder,
    make_writable_folder,
)
from trimaran.comm.topology import MAX_RANKS
from trimaran.launcher.config import LogConfig, MpiConfig, RestartPolicy
from trimaran.launcher.flags.access_flags import own_grpc_options
from trimaran.launcher.flags.serve_flags import DEFAULT_LOG_FILE
from trimaran.launcher.flags.triton_flags import check_triton_flags, grpc_options, idle_notes
from trimaran.launcher.placement.job import Job, current_job
from trimaran.launcher.resolution.access import access_config, connection_limits, tls_notes
from trimaran.launcher.resolution.engine_flags import EngineFlags
from trimaran.launcher.resolution.openai import openai_config
from trimaran.server.config import FrontendConfig
from trimaran.server.inference.forwarded_headers import compiled
from trimaran.server.metrics.options import MetricsOptions
from trimaran.server.settings import LOG_KINDS, level_name
from trimaran.worker.config.engine_config import ProfileConfig
from trimaran.worker.config.experts_config import ExpertsConfig
from trimaran.worker.config.parallel_sizes import RequestedSizes
from trimaran.worker.config.stages import parse_partition

_WITHOUT_EFFECT = {
    "tritonserver": "the server is Trimaran's own",
    "multimodal_gpu0_cuda_mem_pool_bytes": "there is no CUDA memory pool in the front end",
    "pinned_memory_pool_byte_size": "there is no pinned memory pool in the front end",
    "cuda_memory_pool_byte_size": "there is no CUDA memory pool in the front end",
    "backend_config": "there are no loadable backends",
    "trtllm_llmapi_launch": "Trimaran starts its ranks itself",
    "disable_auto_complete_config": "configurations are never completed",
    "enable_kserve_frontends": "the ports of /v2 are open, unless --allow-http or --allow-grpc "
    "is false",
    "force": "servers on other ports never conflict",
}
_ALL_MODELS = "*"

_STALL_TIMEOUT_S = 60.0
MAX_FRONTENDS = 64
"""Most front ends of one server."""


def stall_timeout_s(args: argparse.Namespace) -> float:
    """How long a front end that computes may be silent.

    Raises:
        ConfigError: shorter than for one that does not compute.
    """
    if args.stall_timeout is None:
        return max(_STALL_TIMEOUT_S, float(args.hang_timeout))
    if args.stall_timeout < args.hang_timeout:
        raise ConfigError(
            f"--stall-timeout {args.stall_timeout:g} is below --hang-timeout "
            f"{args.hang_timeout:g}: a front end that computes may be silent for longer than "
            "one that has hung, not shorter. Raise the first or lower the second."
        )
    return float(args.stall_timeout)


def check_flags(args: argparse.Namespace, job: Job | None) -> None:
    """Refuse flags that contradict each other, or that this version does not support.

    Raises:
        ConfigError: names the flags and the remedy.
    """
    if not args.model_repo:
        raise ConfigError("--model-repo DIR is missing: the model repository to serve")
    check_triton_flags(args)
    if args.no_mpi and (args.mpirun or args.mpi != "auto"):
        raise ConfigError("--no-mpi goes together with neither --mpi nor --mpirun")
    if args.oversubscribe and (args.no_mpi or job is not None):
        why = "--no-mpi starts none" if args.no_mpi else "the outer MPI job has ranks"
        raise ConfigError(f"--oversubscribe is for our mpirun, but {why}. Leave it out.")
    if args.mpi == "job" and args.mpirun:
        raise ConfigError("--mpi job starts no mpirun of its own: leave out --mpirun")
    if args.disable_spawn_processes and not args.multi_model:
        raise ConfigError(
            "--disable-spawn-processes says how --multi-model gets its ranks. Add "
            "--multi-model, or leave it out."
        )
    _check_hosts(args, job)
    _check_world_size(args, job)
    _check_model_control(args)
    _check_frontends(args)
    MetricsOptions.parse(_metrics_config(args))
    for flag in ("--http-header-forward-pattern", "--grpc-header-forward-pattern"):
        compiled(flag, getattr(args, flag[2:].replace("-", "_")))


def _check_frontends(args: argparse.Namespace) -> None:
    count = args.frontend_processes
    if count > MAX_FRONTENDS:
        raise ConfigError(
            f"--frontend-processes is {count} but at most {MAX_FRONTENDS} share the ports: "
            "each of them has a connection to every engine. Name fewer."
        )
    if count > 1 and "summary_latencies=true" in args.metrics_config:
        raise ConfigError(
            f"--metrics-config summary_latencies=true: the quantiles of {count} front ends "
            "cannot be added up. Use histogram_latencies=true, or --frontend-processes 1."
        )


def _check_hosts(args: argparse.Namespace, job: Job | None) -> None:
    flag = "--hosts" if args.hosts else "--hostfile" if args.hostfile else ""
    if flag and (job is not None or args.no_mpi):
        why = (
            "the MPI job that we run in has its hosts" if job else "--no-mpi starts ranks here"
        )
        raise ConfigError(f"{flag} cannot take effect: {why}. Leave it out.")
    if args.rsh_agent and not flag:
        raise ConfigError(
            "--rsh-agent reaches other hosts, but none are named. Add --hosts, or leave it out."
        )
    words = args.rsh_agent.split()
    if args.rsh_agent and (not words or shutil.which(words[0]) is None):
        raise ConfigError(f"--rsh-agent {args.rsh_agent}: no such program")


def _check_world_size(args: argparse.Namespace, job: Job | None) -> None:
    if not args.multi_model:
        return
    if not args.disable_spawn_processes:
        world_size = job.size if job is not None else args.world_size
        if world_size not in (None, 1):
            raise ConfigError(
                "World size must be 1 when using multi-model without disable-spawn-processes, "
                f"but is {world_size}: each model's group is started by itself, at the size of "
                "its engine. Leave out --world-size and start one process, or add "
                "--disable-spawn-processes."
            )
        return
    if (args.world_size or 0) > MAX_RANKS + 1:
        raise ConfigError(
            f"--world-size is {args.world_size}, but at most {MAX_RANKS} ranks and the "
            "orchestrator's place make one job. Lower it, or leave it out."
        )
    if args.no_mpi:
        raise ConfigError("--disable-spawn-processes needs an MPI job: leave out --no-mpi")
    if args.model_control_mode != "none":
        raise ConfigError(
            f"--model-control-mode {args.model_control_mode} does not go together with "
            "--disable-spawn-processes: all ranks start with the server, and models cannot "
            "get others later. Leave out one of the two."
        )
    if job is not None and args.world_size not in (None, job.size):
        raise ConfigError(
            f"--world-size is {args.world_size} but this MPI job has {job.size} tasks. Leave "
            "it out, or start the job with that many tasks."
        )


def _check_model_control(args: argparse.Namespace) -> None:
    if args.load_model and args.model_control_mode != "explicit":
        raise ConfigError(
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
        )
    if _ALL_MODELS in args.load_model and len(args.load_model) > 1:
        raise ConfigError(
            f"--load-model {_ALL_MODELS} means all models and goes together with no other "
            f"name, but {len(args.load_model)} were given"
        )


def apply_environment(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Read the environment variables that replace flags in Triton's TensorRT-LLM backend."""
    if environ.get("TRTLLM_ORCHESTRATOR") == "1":
        args.multi_model = True
        if environ.get("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES") == "0":
            args.disable_spawn_processes = True
    if environ.get("FORCE_DETERMINISTIC") == "1":
        args.deterministic = True
    if environ.get("TLLM_LOG_LEVEL", "").upper() in ("TRACE", "DEBUG"):
        args.log_verbose = max(args.log_verbose, 1)


def job_of(args: argparse.Namespace) -> Job | None:
    """The MPI job that this process is a task of, unless the flags request another way.

    Raises:
        ConfigError: ``--mpi job`` outside of a job.
    """
    if args.no_mpi or args.mpirun or args.mpi not in ("auto", "job"):
        return None
    job = current_job(os.environ)
    if job is None and args.mpi == "job":
        raise ConfigError(
            "--mpi job: this process is no task of an MPI job. Start it with mpirun or srun, "
            "one task a rank."
        )
    return job


def engine_flags(args: argparse.Namespace) -> EngineFlags:
    """The flags that go into every engine."""
    return EngineFlags(
        sizes=_sizes(args),
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        verify_weights=not args.skip_weight_verification,
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        tokens_per_block=args.tokens_per_block,
        expected_output_tokens=args.expected_output_tokens,
        depth=args.depth,
        num_threads=args.num_threads,
        deterministic=args.deterministic,
        prompt_graph_tokens=args.prompt_graph_tokens,
        collective_graphs=args.collective_graphs,
        first_layer_table=args.first_layer_table,
        all_reduce=args.all_reduce,
        adapter_graphs=args.adapter_graphs,
        speculative_decoding=args.speculative_decoding,
        draft_model=args.draft_model,
        max_draft_tokens=args.max_draft_tokens,
        verifies_all_drafts=args.verify_all_drafts,
        guide_timeout_s=args.guide_timeout,
        guide_step_timeout_s=args.guide_step_timeout,
        max_guide_processes=args.guide_processes,
        experts=ExpertsConfig(
            rebalance_steps=args.moe_rebalance_steps,
            num_redundant=args.moe_redundant_experts,
        ),
    )


def _sizes(args: argparse.Namespace) -> RequestedSizes:
    return RequestedSizes(
        # In leader mode --world-size is that of a group, in orchestrator mode of the whole job.
        world_size=0 if args.multi_model else args.world_size or 0,
        tp_size=args.tp_size or 0,
        pp_size=args.pp_size or 0,
        dp_size=args.dp_size or 0,
        pp_partition=parse_partition(args.pp_partition) if args.pp_partition else (),
        moe_tp_size=args.moe_tp_size,
        moe_ep_size=args.moe_ep_size,
    )


def frontend_config(
    args: argparse.Namespace, groups: Mapping[str, tuple[str, ...]]
) -> FrontendConfig:
    """The front end's configuration; ``groups`` are those started with it, by model."""
    http_address = args.http_address or "0.0.0.0"
    return FrontendConfig(
        model_repository=os.path.abspath(args.model_repo),
        groups=dict(groups),
        num_frontends=args.frontend_processes,
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
        http_max_pending_bytes=args.http_max_pending_size,
        grpc_max_message_bytes=args.grpc_max_message_size,
        grpc_max_pending_bytes=args.grpc_max_pending_size,
        tokenizer_workers=args.tokenizer_workers,
        max_text_bytes=args.max_text_bytes,
        max_unread_logits_bytes=args.max_unread_logits_bytes,
        clamps_ids=args.out_of_vocabulary == "clamp",
        exit_timeout_s=args.exit_timeout,
        replay_timeout_s=args.replay_timeout,
        max_replays=args.max_replays,
        strict_readiness=args.strict_readiness,
        model_control_mode=args.model_control_mode,
        load_models=tuple(args.load_model),
        python_models=args.python_models,
        repository_poll_s=float(args.repository_poll_secs),
        routing=args.routing,
        log_verbose_level=max(args.log_verbose, 3 if args.log else 0),
        log_kinds={kind: getattr(args, kind) for kind in LOG_KINDS},
        grpc_options=grpc_options(args) | own_grpc_options(args),
        grpc_max_calls=args.grpc_max_calls,
        grpc_message_timeout_s=args.grpc_message_timeout,
        grpc_send_timeout_s=args.grpc_send_timeout,
        http_limits=connection_limits(args),
        access=access_config(args),
        openai=openai_config(args),
        metrics_config=_metrics_config(args),
        metrics_interval_s=args.metrics_interval_ms / 1000,
        allow_client_shm=args.allow_client_shm,
        http_header_forward_pattern=args.http_header_forward_pattern,
        grpc_header_forward_pattern=args.grpc_header_forward_pattern,
        allow_cpu_metrics=args.allow_cpu_metrics,
        allow_gpu_metrics=args.allow_gpu_metrics,
    )


def _metrics_config(args: argparse.Namespace) -> dict[str, str]:
    found = {}
    for setting in args.metrics_config:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--metrics-config {setting!r} is not of the form KEY=VALUE")
        found[key] = value
    return found


def mpi_config(args: argparse.Namespace, job: Job | None) -> MpiConfig:
    """The way of starting ranks."""
    return MpiConfig(
        kind="none" if args.no_mpi else "job" if job is not None else args.mpi,
        mpirun=args.mpirun,
        oversubscribe=args.oversubscribe,
        rsh_agent=args.rsh_agent,
    )


def restart_policy(args: argparse.Namespace, job: Job | None) -> RestartPolicy:
    """The restart policy of dead groups."""
    # Ranks of an outer MPI job cannot be restarted from here.
    may_restart = args.restart == "on-failure" and job is None
    return RestartPolicy(
        max_restarts=args.max_restarts if may_restart else 0, window_s=args.restart_window
    )


def log_config(args: argparse.Namespace) -> LogConfig:
    """The destinations of log lines."""
    is_verbose = args.log or args.log_verbose > 0
    kinds = {kind: getattr(args, kind) for kind in LOG_KINDS}
    return LogConfig(
        format=args.log_format,
        level=level_name(kinds, is_verbose=is_verbose),
        file=args.log_file or (DEFAULT_LOG_FILE if args.log else ""),
        dir=_log_dir(args.log_dir),
    )


def profile_config(args: argparse.Namespace) -> ProfileConfig | None:
    """The steps to trace, written beside the logs; None for no trace."""
    return ProfileConfig.parse(args.profile, _log_dir(args.log_dir)) if args.profile else None


def notes(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags that were accepted without effect, for the log."""
    own = (
        f"--{name.replace('_', '-')} has no effect: {why}"
        for name, why in _WITHOUT_EFFECT.items()
        if getattr(args, name)
    )
    return (*own, *idle_notes(args), *tls_notes(args))


def ready_file(args: argparse.Namespace) -> str:
    """The path of the ready file; raises ConfigError if it cannot be written."""
    if not args.ready_file:
        return ""
    path: str = os.path.abspath(args.ready_file)
    make_folder("--ready-file", os.path.dirname(path))
    check_replaceable("--ready-file", path)
    return path


def _log_dir(path: str) -> str:
    return make_writable_folder("--log-dir", path) if path else ""


def example_prompt(args: argparse.Namespace) -> str:
    """The prompt in a file; raises ConfigError if it cannot be read."""
    if not args.example_prompt:
        return ""
    try:
        return read_text(args.example_prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--example-prompt {args.example_prompt}:", error) from None
