"""The hosts that ranks may run on, their names, and the GPUs of this host."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import UTF8, unreadable
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.placement.placement import Host

LOCAL = "localhost"
_PROBE_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SLOTS = re.compile(r"0*[1-9][0-9]{0,8}")

_ADVERTISED_REMEDY = (
    "Name an address of this host that the ranks' hosts reach, or leave the flag out: one is "
    "looked for where ranks are on other hosts."
)
_SSH_TIMEOUT_S = 30.0
_OTHER_AGENTS = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
"""Variables that name the operator's own program to start mpirun's daemons."""


def named_hosts(args: argparse.Namespace, device: str) -> tuple[Host, ...]:
    """The hosts of ``--hosts`` or ``--hostfile``, in order; none if neither is given.

    A slot is room for a rank, and with ``device`` cuda a GPU. A host without a number has one
    slot for each mention, as with mpirun.

    Raises:
        ConfigError: an entry is malformed.
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
    """Whether a name means this host."""
    ours = socket.gethostname()
    return name in (LOCAL, "127.0.0.1", ours, ours.partition(".")[0])


def allocated_hosts(environ: Mapping[str, str], device: str) -> tuple[Host, ...]:
    """The hosts of this process's Slurm allocation; none if it has only this host.

    Raises:
        ConfigError: Slurm does not name them.
    """
    if environ.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return ()
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    names = _expand(nodes)
    # Overlapping steps may have as many tasks as CPUs, whatever the job's own number.
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
    """Slurm's list of numbers for nodes: ``4(x2),2`` is 4, 4, 2."""
    numbers: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        numbers += [int(count)] * int(times or 1)
    return numbers


def check_host_names(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse an advertised address that is not this host's, and hosts that do not resolve.

    Raises:
        ConfigError: names the host and the flag.
    """
    if config.advertise_address:
        advertised_ip(config.advertise_address)
    # In a Slurm job the daemons are a step: Slurm reaches nodes whose names have no address.
    if "SLURM_JOB_ID" in environ or any(name in environ for name in _OTHER_AGENTS):
        return
    hosts = [entry.host for group in config.groups for entry in group.hosts]
    hosts += [entry.host for entry in config.world_hosts]
    _check_hosts(dict.fromkeys(hosts), (config.mpi.rsh_agent or "ssh").split())


def advertised_ip(address: str) -> str:
    """The IPv4 address that ``--advertise-address`` means, which is one of this host's.

    The ports for ranks of other hosts listen on this address alone.

    Raises:
        ConfigError: there is none, or other hosts cannot mean this host by it.
    """
    # The listeners for other hosts use IPv4.
    reason = _unknown(address, socket.AF_INET)
    if reason:
        raise ConfigError(
            f"--advertise-address {address}: no IPv4 address is found for it here ({reason}). "
            f"{_ADVERTISED_REMEDY}"
        )
    found = {str(info[4][0]) for info in socket.getaddrinfo(address, None, socket.AF_INET)}
    own = sorted(ip for ip in found if _is_own(ip))
    if not own:
        raise ConfigError(
            f"--advertise-address {address}: {', '.join(sorted(found))} is no address of this "
            f"host, so nothing could listen there. {_ADVERTISED_REMEDY}"
        )
    if address not in (LOCAL, *own) and own[0].startswith("127."):
        raise ConfigError(
            f"--advertise-address {address}: this name means {own[0]} here, which other hosts "
            f"do not reach. {_ADVERTISED_REMEDY}"
        )
    return own[0]


def _is_own(ip: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((ip, 0))
        except OSError:
            return False
    return True


def _check_hosts(hosts: Iterable[str], agent: Sequence[str]) -> None:
    if os.path.basename(agent[0]) != "ssh":
        return  # another program than ssh may resolve names differently
    for host in hosts:
        reason = "" if is_this_host(host) else _unknown(host)
        if reason and not _ssh_knows(agent, host):
            raise ConfigError(
                f"--hosts or --hostfile names {host!r}, but no address is found for it here "
                f"({reason}). Correct the name, add it to /etc/hosts or ~/.ssh/config, or "
                "name the host by its address."
            )


def _unknown(name: str, family: int = socket.AF_UNSPEC) -> str:
    """The reason why a host cannot be resolved; empty if it can."""
    try:
        socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "this cannot be a host's name"
    return ""


def _ssh_knows(agent: Sequence[str], host: str) -> bool:
    """Whether ssh's own configuration gives the name an address or a proxy."""
    if shutil.which(agent[0]) is None:
        return False
    try:
        done = subprocess.run(
            [*agent, "-T", "-G", host],
            capture_output=True, text=True, timeout=_SSH_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return False
    options = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if "proxyjump" in options or "proxycommand" in options:
        return True
    name = options.get("hostname", host)
    return name != host and not _unknown(name)


def num_visible_gpus() -> int:
    """GPUs that a rank on this host could use, after CUDA_VISIBLE_DEVICES."""
    present = (
        sum(bool(re.fullmatch(r"nvidia\d+", entry)) for entry in os.listdir("/dev"))
        or _num_driver_gpus()
    )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    words = [word for word in chosen.split(",") if word.strip()]
    # CUDA stops at the first invalid entry: "-1" hides all devices.
    named = next((n for n, word in enumerate(words) if word.strip() == "-1"), len(words))
    return named if any(word.startswith("MIG") for word in words) else min(named, present)


def torch_is_cpu_only() -> bool:
    """Whether the installed torch is a build without CUDA."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def _num_driver_gpus() -> int:
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0
