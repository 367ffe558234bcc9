"""The names by which hosts are to reach each other: they resolve before anything starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import ServeConfig
from trimaran.launcher.placement.hosts import is_this_host

_SSH_TIMEOUT_S = 30.0
_OTHER_AGENTS = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER_EXEC")
"""Variables that have mpirun start its daemons by a program of the operator's."""


def check_host_names(config: ServeConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse an advertised address, and hosts of ranks, that no name service knows.

    Raises:
        ConfigError: names the host and the flag.
    """
    if config.advertise_address:
        _check_advertised(config.advertise_address)
    # In a Slurm job the daemons are a step: Slurm knows the nodes, whatever names resolve.
    if "SLURM_JOB_ID" in environ or any(name in environ for name in _OTHER_AGENTS):
        return
    hosts = [entry.host for group in config.groups for entry in group.hosts]
    hosts += [entry.host for entry in config.world_hosts]
    _check_hosts(dict.fromkeys(hosts), (config.mpi.rsh_agent or "ssh").split())


def _check_advertised(address: str) -> None:
    # The listeners for other hosts are IPv4's.
    reason = _unknown(address, socket.AF_INET)
    if reason:
        raise ConfigError(
            f"--advertise-address {address}: no IPv4 address is found for it here ({reason}). "
            "Name an address of this host that the ranks' hosts reach, or leave the flag out: "
            "one is looked for where ranks are on other hosts."
        )


def _check_hosts(hosts: Iterable[str], agent: Sequence[str]) -> None:
    if os.path.basename(agent[0]) != "ssh":
        return  # What a program of the operator's makes of a name is its own affair.
    for host in hosts:
        reason = "" if is_this_host(host) else _unknown(host)
        if reason and not _ssh_knows(agent, host):
            raise ConfigError(
                f"--hosts or --hostfile names {host!r}, but no address is found for it here "
                f"({reason}). Correct the name, add it to /etc/hosts or ~/.ssh/config, or "
                "name the host by its address."
            )


def _unknown(name: str, family: int = socket.AF_UNSPEC) -> str:
    """Why no address is found for a host; empty if one is."""
    try:
        socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "this cannot be a host's name"
    return ""


def _ssh_knows(agent: Sequence[str], host: str) -> bool:
    """Whether ssh's own configuration gives the name an address, or another way there."""
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
