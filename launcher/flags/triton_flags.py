"""Flags of tritonserver that Trimaran does not share: served, idle, or refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from trimaran.builder.foreign_flags import ForeignFlag, check_foreign_flags
from trimaran.comm.files.flag_values import boolean, count, positive
from trimaran.launcher.flags.parser import FlagParser

_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_ONE_LOOP = "a front end is one event loop; --frontend-processes N adds others"
_NO_POOL = "there is no such pool"
_NO_CACHE = "responses are not cached: prompts are, by enable_kv_cache_reuse in config.pbtxt"
_NO_TRACE = "requests are not traced: --profile steps=A:B traces what an engine does"

_IDLE = {
    "http-thread-count": _ONE_LOOP,
    "grpc-infer-thread-count": _ONE_LOOP,
    "grpc-infer-allocation-pool-size": _NO_POOL,
    "grpc-max-response-pool-size": _NO_POOL,
    "buffer-manager-thread-count": _NO_POOL,
    "cuda-virtual-address-size": _NO_POOL,
    "model-load-thread-count": "models are loaded side by side, however many they are",
    "enable-peer-access": "--all-reduce says how GPUs read each other's memory",
    "backend-directory": "there are no loadable backends",
    "repoagent-directory": "there are no repository agents",
    "cache-directory": "there are no response caches",
    "strict-model-config": "configurations are never completed",
    "min-supported-compute-capability": "a GPU that cannot run the model says so",
    "sagemaker-port": "the port is not opened",
    "sagemaker-safe-port-range": "the port is not opened",
    "sagemaker-thread-count": "the port is not opened",
    "vertex-ai-port": "the port is not opened",
    "vertex-ai-thread-count": "the port is not opened",
    "vertex-ai-default-model": "the port is not opened",
    "uvicorn-log-level": "--log-info, --log-warning, --log-error and --log-verbose set levels",
    "max-tool-call-parse-bytes": "tool calls are passed on as they are read: no call is kept",
}
"""The reason why a flag has no effect, whatever its value."""

_OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "backend": (
        "models have the inputs and outputs of Triton's TensorRT-LLM backend; it must be "
        "tensorrtllm", ("tensorrtllm",)),
    "exit-on-error": (
        "a model that fails at the start ends the server: to serve without it, name the others "
        "with --model-control-mode explicit --load-model NAME; it must be true", _YES),
    "model-config-name": ("only config.pbtxt is read: give the file that name", ()),
    "model-load-retry-count": (
        "a load that fails is not tried again, but a group that dies is started again "
        "(--max-restarts N); it must be 0", ("0",)),
    "model-namespacing": ("every model needs a name of its own; it must be false", _NO),
    "reuse-http-port": (
        "only the front ends of one server share its ports (--frontend-processes N); it must "
        "be false", _NO),
    "reuse-grpc-port": (
        "only the front ends of one server share its ports (--frontend-processes N); it must "
        "be false", _NO),
    "grpc-infer-response-compression-level": (
        "responses are not compressed over gRPC; it must be none", ("none",)),
    "trace-config": (f"{_NO_TRACE}; the level must be OFF",
                     ("level=off", "mode=triton", "mode=opentelemetry")),
    "trace-level": (f"{_NO_TRACE}; it must be OFF", ("off",)),
    "trace-file": (_NO_TRACE, ()),
    "trace-rate": (_NO_TRACE, ()),
    "trace-count": (_NO_TRACE, ()),
    "trace-log-frequency": (_NO_TRACE, ()),
    "cache-config": (_NO_CACHE, ()),
    "response-cache-byte-size": (f"{_NO_CACHE}; it must be 0", ("0",)),
    "rate-limit": (
        "each engine schedules its own requests: max_batch_size and max_queue_size in "
        "config.pbtxt limit them; it must be off", ("off",)),
    "rate-limit-resource": (
        "each engine schedules its own requests: max_batch_size and max_queue_size in "
        "config.pbtxt limit them", ()),
    "host-policy": (
        "ranks choose the cores beside their GPU themselves: --num-threads says how many", ()),
    "model-load-gpu-limit": (
        "kv_cache_free_gpu_mem_fraction in config.pbtxt says what an engine takes of a GPU",
        ()),
    "allow-sagemaker": (
        "SageMaker's paths are not served: clients call those of --http-port; it must be "
        "false", _NO),
    "allow-vertex-ai": (
        "Vertex AI's paths are not served: clients call those of --http-port; it must be "
        "false", _NO),
}  # fmt: skip
"""The remedy, and the values that match Trimaran's behaviour anyway."""

_REFUSED = tuple(ForeignFlag(f"--{name}", *each) for name, each in _OTHERS.items())

GRPC_OPTIONS = {
    "grpc-keepalive-time": ("grpc.keepalive_time_ms", "MS", "between pings (60000)"),
    "grpc-keepalive-timeout": ("grpc.keepalive_timeout_ms", "MS", "for its answer (20000)"),
    "grpc-keepalive-permit-without-calls": (
        "grpc.keepalive_permit_without_calls", "BOOL", "pings without calls too (false)"),
    "grpc-http2-max-pings-without-data": (
        "grpc.http2.max_pings_without_data", "N", "pings between two frames of data (2)"),
    "grpc-http2-min-recv-ping-interval-without-data": (
        "grpc.http2.min_recv_ping_interval_without_data_ms", "MS",
        "that clients leave between pings (300000)"),
    "grpc-http2-max-ping-strikes": (
        "grpc.http2.max_ping_strikes", "N", "pings too soon that end a connection (2)"),
    "grpc-max-connection-age": (
        "grpc.max_connection_age_ms", "MS", "until a connection is to end (never)"),
    "grpc-max-connection-age-grace": (
        "grpc.max_connection_age_grace_ms", "MS", "for the calls of one that is (no limit)"),
}  # fmt: skip
"""gRPC's own name of the setting, and the flag's help."""


def add_triton_flags(parser: argparse.ArgumentParser) -> None:
    """Declare these flags, all of them omitted from the short help."""
    add = parser.add_argument
    for name, (_, metavar, text) in GRPC_OPTIONS.items():
        kind = boolean if metavar == "BOOL" else count
        add(f"--{name}", type=kind, metavar=metavar, help=f"gRPC: {text}")
    for name in ("info", "warning", "error"):
        add(f"--log-{name}", type=boolean, default=True, metavar="BOOL",
            help=f"log lines of level {name} (true)")  # fmt: skip
    for name in ("cpu", "gpu"):
        add(f"--allow-{name}-metrics", type=boolean, default=True, metavar="BOOL",
            help=f"show nv_{name}_* among the metrics (true)")  # fmt: skip
    for name in ("http", "grpc"):
        add(f"--{name}-header-forward-pattern", default="", metavar="REGEX",
            help="requests' headers that models get as parameters (none)")  # fmt: skip
    add("--allow-client-shm", type=boolean, default=False, metavar="BOOL",
        help="clients may register shared memory of this host (false)")  # fmt: skip
    add("--metrics-interval-ms", type=positive, default=2000, metavar="MS",
        help="age at which figures of the host are read again (%(default)s)")  # fmt: skip
    for name, why in _IDLE.items():
        add(f"--{name}", metavar="VALUE", help=f"accepted without effect: {why}")
    for flag in _REFUSED:
        # If both forms are given, both count.
        add(flag.name, nargs="*", action="extend", metavar="VALUE", help=flag.refusal)
    if isinstance(parser, FlagParser):
        served = ("allow_cpu_metrics", "allow_gpu_metrics", "metrics_interval_ms",
                  "http_header_forward_pattern", "grpc_header_forward_pattern",
                  "allow_client_shm", "log_info", "log_warning", "log_error")  # fmt: skip
        parser.hide(*served, *map(_dest, GRPC_OPTIONS), *map(_dest, _IDLE))
        parser.hide(*(flag.dest for flag in _REFUSED))


def check_triton_flags(args: argparse.Namespace) -> None:
    """Refuse flags of unsupported features.

    Raises:
        ConfigError: names the flag, its value and the remedy.
    """
    check_foreign_flags(args, _REFUSED)


def grpc_options(args: argparse.Namespace) -> dict[str, int]:
    """The requested gRPC settings, by gRPC's own names."""
    values = {option: getattr(args, _dest(name)) for name, (option, *_) in GRPC_OPTIONS.items()}
    return {option: int(value) for option, value in values.items() if value is not None}


def idle_notes(args: argparse.Namespace) -> Iterator[str]:
    """The given flags without effect, for the log."""
    for name, why in _IDLE.items():
        if getattr(args, _dest(name)) is not None:
            yield f"--{name} has no effect: {why}"


def _dest(name: str) -> str:
    return name.replace("-", "_")
