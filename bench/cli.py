"""`trimaran bench`: a server under load, or an engine in this process."""

from __future__ import annotations

import argparse
import importlib

from trimaran.bench import kernel_flags, offline_flags, report, serve_flags
from trimaran.client import bench, bench_flags
from trimaran.comm.output_files import check_writable

_COMMANDS: dict[str, tuple[str, str, str]] = {
    "throughput": (
        "trimaran.bench.throughput", "run_throughput",
        "an engine in this process, requests all at once",
    ),
    "latency": (
        "trimaran.bench.throughput", "run_latency",
        "an engine in this process, one request at a time",
    ),
    "serve": (
        "trimaran.bench.serve", "run_serve",
        "a server, also at several rates and concurrencies in turn",
    ),
    "kernels": (
        "trimaran.bench.kernels", "run_kernels",
        "the operators of a layer, each against its own limit",
    ),
    "report": (
        "trimaran.bench.report", "run_report", "tables and a plot from the files of --output",
    ),
}  # fmt: skip
"""Module, function and summary of each sub-command that is not a plain benchmark's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a server's benchmark, and the sub-commands."""
    kinds = bench_flags.add_arguments(parser)
    own = {name: kinds.add_parser(name, help=each[2]) for name, each in _COMMANDS.items()}
    offline_flags.add_flags(own["throughput"])
    offline_flags.add_peer(own["throughput"])
    offline_flags.add_flags(own["latency"])
    serve_flags.add_flags(own["serve"], parser)
    kernel_flags.add_flags(own["kernels"])
    report.add_flags(own["report"])


def run(args: argparse.Namespace) -> int:
    """Run what was asked for. Returns the exit code."""
    if args.workload not in _COMMANDS:
        return bench.run(args)
    for name in ("output", "plot"):
        if getattr(args, name, None):
            check_writable(f"--{name}", getattr(args, name))
    # Imported only now: a client's machine may have no torch.
    module, function, _ = _COMMANDS[args.workload]
    return int(getattr(importlib.import_module(module), function)(args))
