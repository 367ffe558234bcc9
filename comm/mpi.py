"""The MPI world of this process: importing this module initialises MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_STARTERS = ("PMIX_NAMESPACE", "PMI_RANK")
_TRANSPORTS = "OMPI_MCA_btl"
_SEGMENTS = "sm,vader"
_SLEEPER = "ofi"
"""The one-sided transport over libfabric sleeps for a second in every start (Open MPI 5.0)."""


@contextlib.contextmanager
def _without_segment() -> Iterator[None]:
    """Keep Open MPI from making a shared-memory segment for a process without a starter.

    No other process, not even a spawned process, can attach to that segment, and MPI never
    deletes the segment: each such process would leave a file in /dev/shm. The libfabric
    transport is left out too. Transports that the operator chose stay.
    """
    given = os.environ.get(_TRANSPORTS)
    if any(name in os.environ for name in _STARTERS) or not (given or "^").startswith("^"):
        yield
        return
    os.environ[_TRANSPORTS] = f"{given},{_SEGMENTS}" if given else f"^{_SEGMENTS},{_SLEEPER}"
    try:
        yield
    finally:
        # Jobs that this process starts have several ranks.
        if given is None:
            del os.environ[_TRANSPORTS]
        else:
            os.environ[_TRANSPORTS] = given


with _without_segment():
    from mpi4py import MPI as MPI  # before our modules: a death before MPI_Init hangs Spawn

from trimaran.comm import env  # noqa: E402
from trimaran.comm.deadlines import wait_for  # noqa: E402
from trimaran.comm.errors import ConfigError, PeerLostError  # noqa: E402

Comm = MPI.Comm

_PR_SET_PDEATHSIG = 1

_ABORT_GRACE_S = 2.0
# Slurm's variable counts the tasks of the step, which are mpirun's daemons if mpirun made the
# step. The variable is therefore read last, if no other starter has set a variable.
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that started together, and their division into hosts that share memory.

    Ranks with equal entries in ``hosts`` can map each other's memory; no other ranks
    may be assumed to share anything.
    """

    comm: Comm
    rank: int
    size: int
    hosts: tuple[str, ...]
    """The host identity of every rank."""

    cut_from: World | None = None
    """The root world that this world is a part of; None for a root world."""

    ranks_there: tuple[int, ...] = ()
    """The number of every rank in ``cut_from``."""

    @classmethod
    def discover(cls, host: str | None = None) -> World:
        """Collective over all ranks. ``host`` overrides the host identity of this rank.

        Raises:
            ConfigError: MPI's world differs from that of the starter.
        """
        check_world_size(MPI.COMM_WORLD.Get_size(), os.environ)
        comm = MPI.COMM_WORLD.Dup()
        hosts = tuple(comm.allgather(host_identity() if host is None else host))
        return cls(comm, comm.Get_rank(), comm.Get_size(), hosts)

    @property
    def root(self) -> World:
        """The root world of this world, or this world itself."""
        return self.cut_from or self

    @property
    def root_ranks(self) -> tuple[int, ...]:
        """The number of every rank in `root`."""
        return self.ranks_there or tuple(range(self.size))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host, in order."""
        return self.ranks_beside(self.rank)

    @property
    def local_rank(self) -> int:
        """Position among the ranks of the same host."""
        return self.local_ranks.index(self.rank)

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of ``rank``, including ``rank``."""
        return tuple(r for r in range(self.size) if self.hosts[r] == self.hosts[rank])

    def duplicate(self) -> Comm:
        """A communicator for a single purpose. Collective."""
        return self.comm.Dup()

    def subgroup(self, ranks: tuple[int, ...], *, is_apart: bool = False) -> World:
        """The world of ``ranks`` alone, renumbered in order.

        Collective over all ranks; each passes the group that it belongs to itself. A world that
        ``is_apart`` is a root world of its own: other ranks may end without it.
        """
        comm = self.comm.Split(min(ranks), ranks.index(self.rank))
        hosts = tuple(self.hosts[rank] for rank in ranks)
        world = World(comm, comm.Get_rank(), comm.Get_size(), hosts)
        if is_apart:
            return world
        there = tuple(self.root_ranks[rank] for rank in ranks)
        return replace(world, cut_from=self.root, ranks_there=there)

    def barrier(self, timeout_s: float, what: str) -> None:
        """Wait for all ranks without burning the core.

        Raises:
            PeerLostError: not all ranks came within ``timeout_s``.
        """
        request = self.comm.Ibarrier()
        if not wait_for(request.Test, timeout_s, max_sleep_s=0.002):
            raise PeerLostError(
                f"rank {self.rank}: not all of {self.size} ranks reached '{what}' within "
                f"{timeout_s:g} s; see the other ranks' logs"
            )


def check_world_size(size: int, environ: Mapping[str, str]) -> None:
    """Compare MPI's world size with the size that the starter announced.

    Raises:
        ConfigError: they differ, as when the starter's MPI is not ours.
    """
    for name in _SIZE_VARIABLES:
        if name not in environ:
            continue
        if int(environ[name]) == size:
            return
        raise ConfigError(
            f"MPI's world has {size} rank(s) but {name} is {environ[name]}: the starter "
            f"and this process's MPI library ({library_version()}) do not fit together. "
            "Under srun choose the plug-in of that library (--mpi=pmix for Open MPI, "
            "--mpi=pmi2 for MPICH); under mpirun use the mpirun of that library."
        )


def job_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The TRIMARAN_ variables of this rank; in an outer job those of rank 0.

    Collective over all ranks in a job that the supervisor did not start.
    """
    own = {name: value for name, value in environ.items() if name.startswith("TRIMARAN_")}
    if env.JOB not in own:
        return own
    shared: dict[str, str] = MPI.COMM_WORLD.bcast(own, root=0)
    return shared


def host_identity() -> str:
    """Equal on two ranks exactly if they can open each other's memory files."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot_id}/{os.readlink('/proc/self/ns/pid')}"


def library_version() -> str:
    """Name and version of the MPI library in use, on one line."""
    first_line = MPI.Get_library_version().split(",")[0].splitlines()[0]
    return " ".join(first_line.replace("\x00", "").replace(":", "").split())


def thread_level() -> int:
    """The thread level that the library granted, as MPI numbers it."""
    return MPI.Query_thread()


def require_threads() -> None:
    """Check that a watchdog thread may abort the job while the main thread is inside MPI.

    Raises:
        ConfigError: the library grants less than MPI_THREAD_MULTIPLE.
    """
    if thread_level() < MPI.THREAD_MULTIPLE:
        raise ConfigError(
            f"{library_version()} grants thread level {thread_level()} but Trimaran needs "
            f"MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}). Use a build of it with threads."
        )


def abort(code: int = 1) -> None:
    """End every rank of the world now; does not return.

    A library that cannot abort any more is given two seconds, then this process dies by
    SIGKILL, which every starter takes as the end of the job.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            pass
    threading.Thread(target=_kill_self, daemon=True).start()
    MPI.COMM_WORLD.Abort(code)
    time.sleep(_ABORT_GRACE_S + 1)


def is_spawned() -> bool:
    """Whether an orchestrator spawned this process's world."""
    return bool(MPI.Comm.Get_parent() != MPI.COMM_NULL)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies.

    Also ends a stopped process and a process that hangs inside MPI.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def finalize() -> None:
    """Leave MPI. Collective; waits for the other ranks."""
    if not MPI.Is_finalized():
        MPI.Finalize()


def _kill_self() -> None:
    time.sleep(_ABORT_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
