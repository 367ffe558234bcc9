"""The hosts that ranks may run on: from flags, from a file, or from a Slurm allocation."""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import UTF8, unreadable
from trimaran.launcher.placement.gpus import num_visible_gpus
from trimaran.orchestrator.placement import Host

LOCAL = "localhost"
_PROBE_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"0*[1-9][0-9]{0,8}")


def named_hosts(args: argparse.Namespace, device: str) -> tuple[Host, ...]:
    """The hosts of ``--hosts`` or ``--hostfile``, in order; none if neither is given.

    A slot is room for a rank, and with ``device`` cuda a GPU. A host without a number has
    one slot each time that it is named, as mpirun counts.

    Raises:
        ConfigError: what is written there names no hosts.
    """
    if args.hosts and args.hostfile:
        raise ConfigError("--hosts and --hostfile name the hosts twice: leave out one")
    if args.hostfile:
        return _hosts(_file_entries(args.hostfile), f"--hostfile {args.hostfile}", device)
    if args.hosts:
        entries = [word.strip() for word in args.hosts.split(",")]
        return _hosts(entries, f"--hosts {args.hosts}", device)
    return ()


def this_host(device: str) -> Host:
    """The host of this process: as many ranks as wanted, or one for each GPU."""
    return Host(name=LOCAL, num_gpus=num_visible_gpus() if device == "cuda" else None)


def is_this_host(name: str) -> bool:
    """Whether a host's name is one of ours."""
    ours = socket.gethostname()
    return name in (LOCAL, "127.0.0.1", ours, ours.partition(".")[0])


def allocated_hosts(environ: Mapping[str, str], device: str) -> tuple[Host, ...]:
    """The hosts of the Slurm allocation that we are in; none if it has only this one.

    Raises:
        ConfigError: Slurm does not say which they are.
    """
    if environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return ()
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    names = _expand(nodes)
    # Steps that overlap may have as many tasks as CPUs, whatever the job's own number.
    slots = _per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    if len(slots) != len(names):
        raise ConfigError(
            f"Slurm names {len(names)} nodes ({nodes}) but {len(slots)} numbers of CPUs. Name "
            "the hosts with --hosts."
        )
    gpus = environ.get("SLURM_GPUS_ON_NODE", "0")
    num_gpus = int(gpus) if device == "cuda" and gpus.isdigit() else None
    return tuple(
        Host(name=name, num_slots=count, num_gpus=num_gpus)
        for name, count in zip(names, slots, strict=True)
    )


def _hosts(entries: list[str], source: str, device: str) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for entry in entries:
        name, colon, count = entry.partition(":")
        if not _NAME.fullmatch(name) or (colon and not _SLOTS.fullmatch(count)):
            raise ConfigError(
                f"{source}: {entry!r} is not a host, as in node1, or a host and its slots, as "
                "in node1:4"
            )
        slots[name] = slots.get(name, 0) + int(count or 1)
    return tuple(
        Host(name=name, num_slots=count, num_gpus=count if device == "cuda" else None)
        for name, count in slots.items()
    )


def _file_entries(path: str) -> list[str]:
    """``name``, ``name:4`` or ``name slots=4``, one a line; ``#`` begins a comment."""
    try:
        text = Path(path).read_text(encoding=UTF8)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--hostfile {path}:", error) from None
    entries = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word[len("slots=") :] for word in words[1:] if word.startswith("slots=")]
        entries.append(f"{words[0]}:{slots[0]}" if slots else words[0])
    if not entries:
        raise ConfigError(f"--hostfile {path}: names no host. Write one a line, as in node1:4")
    return entries


def _expand(nodes: str) -> list[str]:
    """The names that a Slurm node list stands for."""
    if "[" not in nodes:
        return [name for name in nodes.split(",") if name]
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        raise ConfigError(
            f"scontrol is not on PATH, so the nodes of {nodes} are not known. Name them with "
            "--hosts."
        )
    try:
        done = subprocess.run(
            [scontrol, "show", "hostnames", nodes],
            capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"scontrol show hostnames {nodes} failed: {error}") from None
    return done.stdout.split()


def _per_node(text: str) -> list[int]:
    """Slurm's form of one number a node: ``4(x2),2`` is 4, 4, 2."""
    numbers: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(count)] * int(times or 1)
    return numbers
