"""The process tree below this process: found, tied to its life, and killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from trimaran.comm.env import GROUP, INCARNATION

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def name_process(name: str) -> None:
    """Give this process a name of at most 15 bytes, by which `pgrep` and `pkill` find it."""
    if _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NAME)")


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies.

    The tree below this process is then complete: no descendant can leave it.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with(parent: int) -> Callable[[], None]:
    """A hook that a new child runs before exec, so that the kernel kills it with ``parent``."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return prepare


def descendants(root: int) -> list[int]:
    """Living processes below ``root``."""
    children = _children_of_all()
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), ())
        found += below
        pending += below
    return found


def tagged(root: int, tag: str) -> list[int]:
    """Living processes below ``root`` that were started for the group of this tag."""
    return list(incarnations(root, tag))


def incarnations(root: int, tag: str) -> dict[int, int]:
    """The processes of `tagged`, each with its incarnation; -1 if unknown."""
    wanted, said = f"{GROUP}={tag}".encode(), f"{INCARNATION}=".encode()
    found: dict[int, int] = {}
    for pid in descendants(root):
        variables = _environ(pid)
        if wanted in variables:
            numbers = [int(each[len(said) :]) for each in variables if each.startswith(said)]
            found[pid] = numbers[0] if numbers else -1
    return found


def kill_tagged(root: int, tag: str, spare: int = 0) -> list[int]:
    """Kill the processes of `tagged` except ``spare``; their pids."""
    found = [pid for pid in tagged(root, tag) if pid != spare]
    for pid in found:
        send(pid, signal.SIGKILL)
    return found


def send(pid: int, signal_number: int) -> None:
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def kill_descendants(root: int) -> list[int]:
    """Kill the processes of `descendants`; returns their pids, empty when all have ended."""
    found = descendants(root)
    for pid in found:
        send(pid, signal.SIGKILL)
    return found


def kill_and_reap_all(timeout_s: float = 5.0) -> list[int]:
    """End every process below this one; kill the remaining ones after ``timeout_s``. Blocks."""
    deadline = time.monotonic() + timeout_s
    left = kill_descendants(os.getpid())
    while left and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
        left = kill_descendants(os.getpid())
    return left


def _environ(pid: int) -> list[bytes]:
    """The environment with which a process was started; empty if it is gone or not readable."""
    try:
        return Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _children_of_all() -> dict[int, list[int]]:
    """Every parent's living children, without zombies."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path("/proc", entry, "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        # The program's name may hold spaces and brackets; fields follow its last bracket.
        state, parent = text.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry))
    return children
