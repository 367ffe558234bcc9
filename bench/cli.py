"""`trimaran bench`: a server under load, or an engine in this process."""

from __future__ import annotations

import argparse
import importlib

from trimaran.bench import kernel_flags, offline_flags
from trimaran.client import bench, bench_flags

_OFFLINE = {
    "throughput": (
        "trimaran.bench.throughput", "run_throughput",
        "an engine in this process, requests all at once",
    ),
    "latency": (
        "trimaran.bench.throughput", "run_latency",
        "an engine in this process, one request at a time",
    ),
    "kernels": (
        "trimaran.bench.kernels", "run_kernels",
        "the operators of a layer, each against its own limit",
    ),
}  # fmt: skip
"""Module, function and summary of the sub-commands that need no server."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a server's benchmark, and the sub-commands."""
    kinds = bench_flags.add_arguments(parser)
    for name, (_, _, summary) in _OFFLINE.items():
        flags = kernel_flags if name == "kernels" else offline_flags
        flags.add_flags(kinds.add_parser(name, help=summary))


def run(args: argparse.Namespace) -> int:
    """Run what was asked for. Returns the exit code."""
    if args.workload not in _OFFLINE:
        return bench.run(args)
    # Imported only now: a client's machine may have no torch.
    module, function, _ = _OFFLINE[args.workload]
    return int(getattr(importlib.import_module(module), function)(args))
