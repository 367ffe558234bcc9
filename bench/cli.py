"""`trimaran bench`: a server under load, or an engine in this process."""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple

from trimaran.bench.kernels import kernel_flags
from trimaran.bench.offline import flags as offline_flags
from trimaran.bench.results import report
from trimaran.bench.serving import benchmark as bench
from trimaran.bench.serving import flags as bench_flags
from trimaran.comm.files.output_files import check_writable


class _Command(NamedTuple):
    """Any sub-command except the plain benchmark."""

    module: str
    function: str
    summary: str
    example: str
    """An example, without ``trimaran bench``."""


_COMMANDS = {
    "throughput": _Command(
        "trimaran.bench.offline.throughput", "run_throughput",
        "an engine in this process, requests all at once",
        "throughput --shape llama8b --load 128/128x4096 --output results.jsonl",
    ),
    "latency": _Command(
        "trimaran.bench.offline.throughput", "run_latency",
        "an engine in this process, the steps of one request, or of a few",
        "latency --shape tiny --load 128/128x1",
    ),
    "serve": _Command(
        "trimaran.bench.serving.serve", "run_serve",
        "a server, also at several rates and concurrencies in turn",
        "serve --load 467/256x500 --rates 2 8 -1 --concurrencies 500 --load-processes 8",
    ),
    "kernels": _Command(
        "trimaran.bench.kernels.command", "run_kernels",
        "the operators of a layer, each against its own limit",
        "kernels --shape llama8b --rows 1 256",
    ),
    "report": _Command(
        "trimaran.bench.results.report", "run_report",
        "tables and a plot from the files of --output",
        "report results.jsonl --plot results.svg",
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a server's benchmark, and the sub-commands."""
    kinds = bench_flags.add_arguments(parser)
    own = {
        name: kinds.add_parser(
            name,
            help=each.summary,
            description=f"{each.summary.capitalize()}.",
            epilog=f"Example:\n  trimaran bench {each.example}",
        )
        for name, each in _COMMANDS.items()
    }
    offline_flags.add_flags(own["throughput"])
    offline_flags.add_peer(own["throughput"])
    offline_flags.add_flags(own["latency"])
    bench_flags.add_flags(own["serve"], parser)
    kernel_flags.add_flags(own["kernels"])
    report.add_flags(own["report"])


def run(args: argparse.Namespace) -> int:
    """Run the chosen sub-command. Returns the exit code."""
    if args.workload:
        args.workload = args.workload.replace("_", "-")
    if args.workload not in _COMMANDS:
        return bench.run(args)
    if args.workload != "serve":
        own = "temperature" if args.workload in ("throughput", "latency") else ""
        bench_flags.refuse_given(args, f"`trimaran bench {args.workload}`", but=own)
    for name in ("output", "plot"):
        if getattr(args, name, None):
            check_writable(f"--{name}", getattr(args, name))
    # Imported only here: a client's machine may not have torch.
    command = _COMMANDS[args.workload]
    return int(getattr(importlib.import_module(command.module), command.function)(args))
