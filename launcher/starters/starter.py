"""How the processes of one group come into being: as one direct child of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trimaran.comm.env import INCARNATION
from trimaran.launcher.starters.children import Children
from trimaran.launcher.starters.group_types import GroupSpec
from trimaran.launcher.starters.process_tree import kill_tagged
from trimaran.launcher.starters.scratch import MpiScratch


@dataclass(frozen=True, slots=True)
class StarterEvents:
    """Whom a starter tells what. Never called from within `Starter.start`."""

    on_exit: Callable[[], None]
    """Its own process has ended; `Starter.status` says how."""

    on_failure: Callable[[str], None]
    """The processes could not be started, or one of them was seen to die; says which."""

    on_starter_lost: Callable[[str], None]
    """What had started them died, and they go with it; says what. It comes back."""


class Starter(Protocol):
    """Starts all processes of a group, and kills them."""

    @property
    def pid(self) -> int:
        """Its own process below this one, from start to end; 0 if it has none."""

    @property
    def status(self) -> int | None:
        """The wait status of its own process; None while that runs or if it has none."""

    @property
    def is_over(self) -> bool:
        """Nothing of the starter itself is left that would have to be waited for."""

    @property
    def title(self) -> str:
        """The starter in log lines."""

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """Start the next incarnation of the group.

        Raises:
            OSError: the program cannot be started.
        """

    def kill(self, *, spare_own: bool = False) -> bool:
        """Kill what there is of the group now; whether there was anything. Called until not.

        Ranks on other hosts are out of reach: they end as their connections close. With
        ``spare_own`` the starter's own process lives on, to say how the first rank died.
        """

    def release(self) -> None:
        """Nothing is wanted any more of the incarnation that was started last."""


class CommandStarter:
    """One direct child: mpirun, srun, or the only process of the group."""

    def __init__(self, spec: GroupSpec, children: Children, scratch: MpiScratch) -> None:
        self._spec = spec
        self._scratch = scratch
        self._children = children
        self._pid = 0
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """See `Starter`."""
        return self._pid

    @property
    def status(self) -> int | None:
        """See `Starter`."""
        return self._status

    @property
    def is_over(self) -> bool:
        """See `Starter`."""
        return self._pid == 0 or self._status is not None

    @property
    def title(self) -> str:
        """See `Starter`."""
        return f"{os.path.basename(self._spec.command[0])} (pid {self._pid})"

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """See `Starter`."""
        self._pid, self._status = 0, None

        def on_exit(status: int) -> None:
            self._status = status
            events.on_exit()

        spec = self._spec
        self._scratch.prepare(spec.tag)
        env = {**spec.env, INCARNATION: str(incarnation)}
        self._pid = self._children.start(
            spec.command, env, on_exit, inherit_fds=spec.inherit_fds
        )

    def kill(self, *, spare_own: bool = False) -> bool:
        """See `Starter`."""
        return bool(kill_tagged(os.getpid(), self._spec.tag, self._pid if spare_own else 0))

    def release(self) -> None:
        """See `Starter`: the child was killed with its group."""
        self._scratch.clear(self._spec.tag)
