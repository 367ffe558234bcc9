"""`trimaran doctor`: checks whether `trimaran serve` can work on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import MpiConfig, TokenizerFolder
from trimaran.launcher.flags import serve_flags
from trimaran.launcher.flags.parser import FlagParser
from trimaran.launcher.placement import preflight
from trimaran.launcher.placement.hosts import (
    check_host_names,
    num_visible_gpus,
    torch_is_cpu_only,
)
from trimaran.launcher.placement.preflight import Endpoint
from trimaran.launcher.resolution import settings
from trimaran.launcher.resolution.resolver import Resolver
from trimaran.launcher.starters import mpi_launch
from trimaran.launcher.starters.run_dir import RunDir
from trimaran.server.repository.model_repository import ModelRepository, Role
from trimaran.worker.config.engine_config import EngineConfig

_MIN_PYTHON = (3, 10)
_PACKAGES = (
    "mpi4py", "torch", "tritonclient", "grpcio", "aiohttp", "uvloop", "msgpack", "numpy",
    "safetensors", "tokenizers", "transformers",
)  # fmt: skip
_READERS = {
    "sentencepiece": "tokenizer folders with a SentencePiece model alone",
    "tiktoken": "tokenizer folders with a tiktoken vocabulary alone",
}
"""Packages that only some tokenizer folders need, and these folders."""

_SHOWN = (
    "help", "model_repo", "multi_model", "world_size", "device", "hosts", "worker_launch",
    "mpirun", "http_port", "grpc_port", "metrics_port",
)  # fmt: skip
_OF_MACHINE = frozenset((
    "model_repo", "config", "mpirun", "http_port", "grpc_port", "metrics_port", "http_address",
    "grpc_address", "metrics_address", "allow_http", "allow_grpc", "allow_metrics",
))  # fmt: skip
"""Flags that can be checked without a repository."""

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``bad`` means that serving cannot work."""

    grade: str
    """``ok``, ``note`` or ``bad``."""

    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `trimaran doctor`: those of `trimaran serve`, whose start is checked."""
    serve_flags.add_arguments(parser)
    parser.usage = "%(prog)s [--model-repo DIR] [flags of trimaran serve]"
    if isinstance(parser, FlagParser):
        parser.hide(*(action.dest for action in parser._actions if action.dest not in _SHOWN))


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if `trimaran serve` can work here, else 1.

    Raises:
        ConfigError: flags about models without a repository; the report could not cover them.
    """
    if not args.model_repo:
        _refuse_flags_of_models(args)
    settings.apply_environment(args, os.environ)
    findings: list[Finding] = []
    examinations = (
        _python, _packages, _programs, _mpi, _devices, _kernels, _memory, _folders, _ports,
        _models,
    )  # fmt: skip
    for examine in examinations:
        for finding in examine(args):
            head, *more = finding.text.splitlines()
            print(f"{_MARKS[finding.grade]} {finding.subject:<14} {head}", flush=True)
            for line in more:
                print(f"{'':<20}{line}", flush=True)
            findings.append(finding)
    num_bad = sum(finding.grade == "bad" for finding in findings)
    if num_bad:
        print(f"\n{num_bad} problem(s) to fix before `trimaran serve` can work here.")
        return 1
    print("\n`trimaran serve` can work here.")
    return 0


def _refuse_flags_of_models(args: argparse.Namespace) -> None:
    parser = FlagParser()
    add_arguments(parser)
    given = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest not in _OF_MACHINE
        and getattr(args, action.dest, action.default) != action.default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} cannot be checked without models: only this machine is "
            "checked. Add --model-repo DIR, or leave out flags about models."
        )


def _python(args: argparse.Namespace) -> Iterator[Finding]:
    text = f"{sys.version.split()[0]} at {sys.executable}"
    if sys.version_info < _MIN_PYTHON:
        yield Finding("bad", "python", f"{text}; 3.10 or newer is needed")
    else:
        yield Finding("ok", "python", text)


def _packages(args: argparse.Namespace) -> Iterator[Finding]:
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        text = f"not installed: {', '.join(missing)}. pip install -e . installs them"
        yield Finding("bad", "packages", text)
    if "torch" not in missing:
        build = "CPU build" if torch_is_cpu_only() else "GPU build"
        yield Finding("ok", "torch", f"{version('torch')} ({build})")

    for name, folders in _READERS.items():
        if not _is_installed(name):
            text = f"{name} is not installed: {folders} are refused. pip install {name}"
            yield Finding("note", "packages", text)


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _programs(args: argparse.Namespace) -> Iterator[Finding]:
    from trimaran.launcher.supervisor.group_specs import Programs

    yield from _tried("programs", lambda: " ".join(Programs.installed().rank))


def _mpi(args: argparse.Namespace) -> Iterator[Finding]:
    try:
        mpi = mpi_launch.find_mpi(MpiConfig(mpirun=args.mpirun))
        yield Finding("ok", "mpirun", str(mpi))
        yield Finding("ok", "MPI library", mpi_launch.check_library(mpi).split(",")[0])
    except ConfigError as error:
        yield Finding("bad", "MPI", str(error))
    if "SLURM_JOB_ID" in os.environ:
        job = os.environ["SLURM_JOB_ID"]
        yield Finding("note", "Slurm", f"inside job {job}: mpirun uses its allocation")


def _devices(args: argparse.Namespace) -> Iterator[Finding]:
    num_gpus = num_visible_gpus()
    cores = len(os.sched_getaffinity(0))
    yield Finding("ok", "CPU", f"{cores} cores usable, {mpi_launch.num_slots()} MPI slots")
    if num_gpus and torch_is_cpu_only():
        text = f"{num_gpus} visible, but this torch is a CPU build: models run on the CPU"
        yield Finding("note", "GPU", text)
    elif num_gpus:
        yield Finding("ok", "GPU", f"{num_gpus} visible: world sizes up to {num_gpus}")
    else:
        yield Finding("note", "GPU", "none visible: models run on the CPU")


def _memory(args: argparse.Namespace) -> Iterator[Finding]:
    def examine() -> str:
        preflight.check_shared_memory(1)
        free = shutil.disk_usage(preflight.SHARED_MEMORY).free
        ranks = free // preflight.SHARED_MEMORY_BYTES_PER_RANK
        return f"{preflight.SHARED_MEMORY} has {free >> 20} MiB free, enough for {ranks} ranks"

    yield from _tried("shared memory", examine)


def _folders(args: argparse.Namespace) -> Iterator[Finding]:
    def examine() -> str:
        run_dir = RunDir()
        run_dir.remove()
        return f"sockets go below {run_dir.path.parent}"

    yield from _tried("run folder", examine)


def _kernels(args: argparse.Namespace) -> Iterator[Finding]:
    from trimaran.kernels.build import KernelsUnavailableError, load_library

    try:
        load_library()
        yield Finding("ok", "CPU kernels", "compiled for this processor")
    except KernelsUnavailableError as error:
        reason = str(error).partition("\n")[0]
        yield Finding("note", "CPU kernels", f"none, torch is used: {reason}")
    yield from _tunings(None)


def _tunings(engine_dir: str | None) -> Iterator[Finding]:
    """The choices of kernels that `trimaran tune` measured: the user's, or a folder's."""
    from trimaran.kernels.tables.tuned_choices import (
        FILE_NAME,
        TuningKey,
        read_tunings,
        user_file,
    )

    path = user_file() if engine_dir is None else Path(engine_dir, FILE_NAME)
    if not path.is_file():
        return
    try:
        for each in read_tunings(path):
            card = each.key.card
            text = f"{len(each.products)} products, {len(each.experts)} of experts on {card}"
            if each.key == TuningKey.of(card):
                yield Finding("ok", "tuned kernels", f"{text}: {path}")
            else:
                text += ", by other kernels or another torch: run trimaran tune again"
                yield Finding("note", "tuned kernels", f"{text}: {path}")
    except ConfigError as error:
        yield Finding("bad", "tuned kernels", str(error))


def _ports(args: argparse.Namespace) -> Iterator[Finding]:
    addresses = {
        "http": args.http_address,
        "grpc": args.grpc_address,
        "metrics": args.metrics_address or args.http_address,
    }
    for name, address in addresses.items():
        if not getattr(args, f"allow_{name}"):
            continue
        endpoint = Endpoint(name, address or "0.0.0.0", getattr(args, f"{name}_port"))

        def examine(endpoint: Endpoint = endpoint) -> str:
            preflight.check_ports([endpoint])
            return f"{endpoint.port} is free"

        for finding in _tried(f"{name} port", examine):
            # Another port solves this without a change to the machine.
            grade = "note" if finding.grade == "bad" else finding.grade
            yield Finding(grade, finding.subject, finding.text)


def _models(args: argparse.Namespace) -> Iterator[Finding]:
    """The groups that would be started for the repository, and their placement."""
    if not args.model_repo:
        return
    try:
        num_models = len(ModelRepository.load(args.model_repo).of_role(Role.TOKEN))
        if num_models > 1 and not args.multi_model and not args.tensorrt_llm_model_name:
            text = f"{num_models} token-level models: serve them with --multi-model"
            yield Finding("note", "models", text)
            args.multi_model = True
        resolver = Resolver(args, settings.job_of(args))
        config = resolver.initial()
        check_host_names(config)
        preflight.check_groups(config.groups)
    except ConfigError as error:
        yield Finding("bad", "models", str(error))
        return
    for group in config.groups:
        engine = group.engine
        text = f"{group.world_size} rank(s) on {engine.device}, {engine.engine_dir}"
        yield Finding("ok", f"group {group.name}", text)
        yield from _tried("memory", partial(_fit, engine))
        yield from _tunings(engine.engine_dir)
    for tokenizer in config.tokenizers:
        yield from _tried("tokenizer", partial(_tokenizer, tokenizer))
    for note in config.notes:
        yield Finding("note", "models", note)
    if config.picture:
        yield Finding("ok", "placement", config.picture)


def _fit(engine: EngineConfig) -> str:
    from trimaran.launcher.cli.fit import memory_lines  # imports torch

    return "\n".join(memory_lines(engine))


def _tokenizer(source: TokenizerFolder) -> str:
    return f"{source.folder}: {preflight.check_tokenizer(source)}"


def _tried(subject: str, examine: Callable[[], str]) -> Iterator[Finding]:
    try:
        yield Finding("ok", subject, examine())
    except ConfigError as error:
        yield Finding("bad", subject, str(error))
