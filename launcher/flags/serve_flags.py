"""The flags of `trimaran serve`: the launch script's, tritonserver's and Trimaran's own."""

from __future__ import annotations

import argparse

from trimaran.comm.files.flag_values import (
    boolean,
    count,
    port,
    positive,
    seconds,
    workers,
)
from trimaran.launcher.flags.access_flags import add_access_flags
from trimaran.launcher.flags.frontend_flags import (
    add_body_flags,
    add_openai_flags,
    add_text_flags,
)
from trimaran.launcher.flags.parser import FlagParser
from trimaran.launcher.flags.step_flags import add_step_flags
from trimaran.launcher.flags.triton_flags import add_triton_flags
from trimaran.worker.config.kv_cache_dtype import FLOATS, KV_CACHE_DTYPES
from trimaran.worker.config.quantization import LOAD_METHODS

DEFAULT_LOG_FILE = "triton_log.txt"
USAGE = "%(prog)s --model-repo DIR [--world-size N] [flags]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every flag; rarely needed ones are left out of the short help."""
    parser.usage = USAGE
    add = parser.add_argument
    add(
        "--model-repo",
        "--model-repository",
        "--model-store",
        metavar="DIR",
        dest="model_repo",
        help="model repository (trimaran init-repo writes one)",
    )
    add(
        "--world-size",
        type=positive,
        metavar="N",
        help="MPI ranks (default: the engine's tp x pp x dp)",
    )
    _add_endpoint_flags(parser)
    add_body_flags(parser)
    add_text_flags(parser)
    _add_model_control_flags(parser)
    _add_engine_flags(parser)
    _add_process_flags(parser)
    _add_time_flags(parser)
    _add_log_flags(parser)
    _add_replaced_flags(parser)
    add_openai_flags(parser)
    add_access_flags(parser)
    add_triton_flags(parser)
    if isinstance(parser, FlagParser):
        parser.hide(*_RARE)
        parser.take_one("model_repo", "Put links to all models into one folder, and name that")


_RARE = (
    "allow_http",
    "allow_grpc",
    "allow_metrics",
    "http_address",
    "grpc_address",
    "metrics_address",
    "frontend_processes",
    "http_max_input_size",
    "http_max_pending_size",
    "grpc_max_message_size",
    "grpc_max_pending_size",
    "tokenizer_workers",
    "max_text_bytes",
    "max_unread_logits_bytes",
    "out_of_vocabulary",
    "strict_readiness",
    "metrics_config",
    "id",
    "model_control_mode",
    "load_model",
    "repository_poll_secs",
    "python_models",
    "routing",
    "tp_size",
    "pp_size",
    "pp_partition",
    "dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "moe_rebalance_steps",
    "moe_redundant_experts",
    "load_format",
    "quantization",
    "kv_cache_dtype",
    "skip_weight_verification",
    "tokens_per_block",
    "expected_output_tokens",
    "depth",
    "deterministic",
    "prompt_graph_tokens",
    "collective_graphs",
    "first_layer_table",
    "all_reduce",
    "adapter_graphs",
    "speculative_decoding",
    "draft_model",
    "max_draft_tokens",
    "verify_all_drafts",
    "connect_timeout",
    "startup_timeout",
    "stall_timeout",
    "example_prompt",
    "log_verbose",
    "disable_spawn_processes",
    "multimodal_gpu0_cuda_mem_pool_bytes",
    "tritonserver",
    "trtllm_llmapi_launch",
    "backend_config",
    "disable_auto_complete_config",
    "enable_kserve_frontends",
    "pinned_memory_pool_byte_size",
    "cuda_memory_pool_byte_size",
    "force",
    "replay_timeout",
    "guide_timeout",
    "guide_step_timeout",
    "guide_processes",
    "max_replays",
    "advertise_address",
    "hostfile",
    "rsh_agent",
    "oversubscribe",
    "restart_window",
    "log_dir",
    "profile",
    "ready_file",
)


def _add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, default in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        title = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics"}[name]
        add(
            f"--{name}-port",
            type=port,
            default=default,
            metavar="P",
            help=f"{title} port (%(default)s)",
        )
        address = "HTTP's" if name == "metrics" else "0.0.0.0; :: is IPv6 too"
        add(f"--{name}-address", metavar="ADDR", help=f"{title} listens here ({address})")
        add(
            f"--allow-{name}",
            type=boolean,
            default=True,
            metavar="BOOL",
            help=f"open the {title} port (true)",
        )
    add(
        "--frontend-processes",
        type=positive,
        default=1,
        metavar="N",
        help="front ends that share the ports (%(default)s)",
    )
    add(
        "--strict-readiness",
        type=boolean,
        default=True,
        metavar="BOOL",
        help="ready means that every model is ready (true)",
    )
    add(
        "--metrics-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="counter_latencies, histogram_latencies, summary_latencies: true or false; "
        "summary_quantiles: QUANTILE:ERROR,...; trtllm_version: nv_trt_llm_* as in this "
        "version, 0.6 to 0.18 (the repository's)",
    )
    add("--id", default="triton", metavar="NAME", help="name in the server metadata (triton)")


def _add_model_control_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model-control-mode",
        default="none",
        choices=("none", "explicit", "poll"),
        help="when models are loaded; none: all at start (none)",
    )
    add(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="with --model-control-mode explicit: load it at start; *: all",
    )
    add(
        "--python-models",
        default="native",
        metavar="WHICH",
        help="whose model.py runs in place of a native role: native (none), execute (all that "
        "have one), or names with commas between (native)",
    )
    add(
        "--repository-poll-secs",
        type=positive,
        default=15,
        metavar="S",
        help="with --model-control-mode poll: pause between two looks (%(default)s)",
    )
    add(
        "--routing",
        default="auto",
        choices=("auto", "least_loaded", "prefix_aware"),
        help="between the instances of a model (%(default)s)",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tensorrt-llm-model-name",
        metavar="NAME",
        help="token-level models to serve, comma between (default: the repository's)",
    )
    _add_size_flags(parser)
    add(
        "--device", default="auto", choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )  # fmt: skip
    _add_dtype_flags(parser)
    add(
        "--load-format", default="auto", choices=("auto", "random"),
        help="random: weights made on the device, no files read",
    )  # fmt: skip
    add(
        "--skip-weight-verification", action="store_true",
        help="load weights without a comparison with their checksums",
    )  # fmt: skip
    for flag, what, default in (
        ("--max-batch-size", "sequences in flight at once", "the folder's"),
        (
            "--max-num-tokens",
            "tokens a step computes at most",
            "the folder's; CPUs: up to 256",
        ),
        ("--tokens-per-block", "tokens of a KV cache block", "the folder's"),
    ):
        add(flag, type=positive, metavar="N", help=f"{what} ({default})")
    add(
        "--expected-output-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="length of outputs that admission by max_utilization expects before any ended "
        "(%(default)s)",
    )
    add(
        "--depth",
        type=positive,
        metavar="N",
        help="steps in flight (one for each stage; with one stage 2 on a GPU, 1 on a CPU)",
    )
    add(
        "--num-threads",
        type=workers,
        metavar="N",
        help="CPU threads a rank (default: the cores shared out)",
    )
    add_step_flags(parser)


def _add_dtype_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--dtype", default="auto", choices=("auto", *FLOATS),
        help="of the weights in memory (the folder's)",
    )  # fmt: skip
    add(
        "--quantization", default="none", choices=("none", *LOAD_METHODS),
        help="of a Hugging Face folder's float weights as they are loaded",
    )  # fmt: skip
    add(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, metavar="TYPE",
        help="fp8, int8 or the model's; auto: as the folder says",
    )  # fmt: skip


def _add_size_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    axes = {
        "tp": "ranks that cut each layer",
        "pp": "stages of layers one after another",
        "dp": "data-parallel (dp) ranks: copies of attention, with requests of their own",
    }
    for name, what in axes.items():
        add(f"--{name}-size", type=positive, metavar="N", help=f"{what} (the folder's)")
    add("--pp-partition", metavar="N,N,...",
        help="layers of each stage (the folder's, or as even as can be)")  # fmt: skip
    sizes = {"tp": "ranks that cut each expert", "ep": "parts that share the experts out"}
    for name, what in sizes.items():
        add(f"--moe-{name}-size", type=int, default=-1, metavar="N",
            help=f"{what}, per tensor group or over all dp ranks (the folder's)")  # fmt: skip
    add("--moe-rebalance-steps", type=positive, default=0, metavar="N",
        help="every N steps, experts change ranks by their loads (never)")  # fmt: skip
    add("--moe-redundant-experts", type=positive, default=0, metavar="N",
        help="slots of a layer for second copies of its busiest experts (none)")  # fmt: skip


def _add_process_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mpi",
        default="auto",
        choices=("auto", "openmpi", "mpich", "job"),
        help="whose mpirun; job: the MPI job we are a task of (auto)",
    )
    add("--mpirun", default="", metavar="PATH", help="mpirun to use (the venv's, then PATH's)")
    add(
        "--advertise-address",
        metavar="ADDR",
        help="where ranks on other hosts reach this one (default: found in a job)",
    )
    add(
        "--multi-model",
        action="store_true",
        help="orchestrator mode: a group of ranks for each token-level model",
    )
    add(
        "--disable-spawn-processes",
        action="store_true",
        help="with --multi-model: all groups in one job, placed by participant_ids",
    )
    add("--hosts", default="", metavar="LIST", help="hosts of the ranks, as in node1:2,node2:2")
    add("--hostfile", default="", metavar="FILE", help="the same, one a line")
    add(
        "--rsh-agent",
        default="",
        metavar="PATH",
        help="starts mpirun's daemons on other hosts (ssh or rsh)",
    )
    add(
        "--worker-launch",
        default="auto",
        choices=("auto", "spawn", "mpirun", "srun"),
        help="how groups are started (auto: what works here)",
    )
    add("--no-mpi", action="store_true", help="one rank a group, without mpirun")
    add("--oversubscribe", action="store_true", help="more ranks than slots")
    add(
        "--restart",
        default="on-failure",
        choices=("on-failure", "never"),
        help="what to do about a dead child (%(default)s)",
    )
    add(
        "--max-restarts",
        type=count,
        default=3,
        metavar="N",
        help="restarts within --restart-window (%(default)s)",
    )
    add(
        "--restart-window",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds over which restarts are counted (%(default)g)",
    )


def _add_time_flags(parser: argparse.ArgumentParser) -> None:
    for flag, default, meaning in (
        ("--hang-timeout", 10.0, "a process silent for longer is ended; 0: never"),
        ("--exit-timeout", 30.0, "longest drain after SIGTERM or Ctrl-C"),
        ("--connect-timeout", 120.0, "a started process reports within this time"),
        ("--startup-timeout", 1800.0, "a process is ready within this time"),
        ("--replay-timeout", 120.0, "requests of a dead group wait this long for it"),
        ("--guide-timeout", 30.0, "a guide is compiled within this time, or refused"),
        ("--guide-step-timeout", 1.0, "one mask of a guide takes at most this CPU time"),
    ):
        names = [flag, "--exit-timeout-secs"] if flag == "--exit-timeout" else [flag]
        parser.add_argument(
            *names, type=seconds, default=default, metavar="S", help=f"{meaning} (%(default)g)"
        )
    parser.add_argument(
        "--stall-timeout",
        type=seconds,
        metavar="S",
        help="a front end that computes may be silent for so long (60, or --hang-timeout)",
    )
    for flag, kind, most, meaning in (
        ("--max-replays", count, 2, "replays of one request before it fails"),
        ("--guide-processes", positive, 64, "different guides in use at once, a process each"),
    ):
        parser.add_argument(
            flag, type=kind, default=most, metavar="N", help=f"{meaning} (%(default)s)"
        )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--log-format",
        default="text",
        type=_log_format,
        metavar="text|json",
        help="one line of text, or one JSON object, an event (%(default)s)",
    )
    add("--log", action="store_true", help="log verbosely, to --log-file too")
    add("--log-dir", default="", metavar="DIR", help="also one log file a process there")
    add(
        "--profile",
        default="",
        metavar="steps=A:B",
        help="trace these steps of every rank, into --log-dir",
    )
    add(
        "--ready-file",
        default="",
        metavar="FILE",
        help="written with the endpoints once serving, removed at the end",
    )
    add("--example-prompt", metavar="FILE", help="prompt of the printed curl line")
    add("--log-file", metavar="FILE", help=f"also log there ({DEFAULT_LOG_FILE} with --log)")
    add("--log-verbose", "--tritonserver-log-verbose-level", type=_verbosity, default=0,
        metavar="N", help="above 0: debug lines")  # fmt: skip


def _add_replaced_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of scripts for Triton's TensorRT-LLM backend that have no effect here."""
    add = parser.add_argument
    add(
        "-f",
        "--force",
        action="store_true",
        help="accepted: servers on other ports never conflict",
    )
    for name, metavar in (
        ("--tritonserver", "PATH"),
        ("--multimodal-gpu0-cuda-mem-pool-bytes", "BYTES"),
        ("--pinned-memory-pool-byte-size", "BYTES"),
    ):
        add(name, metavar=metavar, help="accepted without effect")
    for name in ("--backend-config", "--cuda-memory-pool-byte-size"):
        add(name, action="append", metavar="VALUE", help="accepted without effect")
    for name in (
        "--trtllm-llmapi-launch", "--disable-auto-complete-config", "--enable-kserve-frontends",
    ):  # fmt: skip
        add(name, action="store_true", help="accepted without effect")


def _verbosity(text: str) -> int:
    if text.isdecimal():
        return count(text)
    try:
        return int(boolean(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a whole number of 0 or more nor true or false"
        ) from None


def _log_format(text: str) -> str:
    if text in ("text", "default", "ISO8601"):
        return "text"
    if text == "json":
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither text nor json")
