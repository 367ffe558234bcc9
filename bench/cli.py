"""`trimaran bench`: a server under load, or an engine in this process."""

from __future__ import annotations

import argparse
import importlib

from trimaran.bench import offline_flags
from trimaran.client import bench, bench_flags

_OFFLINE = {
    "throughput": ("run_throughput", "an engine in this process, requests all at once"),
    "latency": ("run_latency", "an engine in this process, one request at a time"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a server's benchmark, and the sub-commands."""
    kinds = bench_flags.add_arguments(parser)
    for name, (_, summary) in _OFFLINE.items():
        offline_flags.add_flags(kinds.add_parser(name, help=summary))


def run(args: argparse.Namespace) -> int:
    """Run what was asked for. Returns the exit code."""
    if args.workload not in _OFFLINE:
        return bench.run(args)
    # Imported only now: a client's machine may have no torch.
    module = importlib.import_module("trimaran.bench.throughput")
    function = getattr(module, _OFFLINE[args.workload][0])
    return int(function(args))
