"""A group that is a Slurm step: its ranks are below Slurm's daemons and end through srun."""

from __future__ import annotations

import os
import signal
import time

from trimaran.launcher.starters.children import Children
from trimaran.launcher.starters.group_types import GroupSpec
from trimaran.launcher.starters.process_tree import kill_tagged, send, tagged
from trimaran.launcher.starters.scratch import MpiScratch
from trimaran.launcher.starters.starter import CommandStarter, StarterEvents

_SRUN_END_S = 4.0
"""srun ends its step in this time, ranks that are stopped included, or is killed."""

_HELPER_END_S = 3.0
"""srun's second process outlives it for so long at most: it ends the step of a dead srun."""


class StepStarter(CommandStarter):
    """An srun. Killed at once with its helper it would leave the ranks to themselves."""

    def __init__(self, spec: GroupSpec, children: Children, scratch: MpiScratch) -> None:
        super().__init__(spec, children, scratch)
        self._killed_since: float | None = None

    def start(self, incarnation: int, events: StarterEvents) -> None:
        """See `starters.Starter`."""
        self._killed_since = None
        super().start(incarnation, events)

    def kill(self, *, spare_own: bool = False) -> bool:
        """See `starters.Starter`: terminate the step, and kill an srun that does not.

        With ``spare_own`` there is nothing to do: srun itself ends a step that lost a rank.
        """
        left = tagged(os.getpid(), self._spec.tag)
        if spare_own or not left:
            return bool(left)
        now = time.monotonic()
        if self._killed_since is None:
            self._killed_since = now
            send(self.pid, signal.SIGTERM)
        elif now - self._killed_since > _SRUN_END_S + _HELPER_END_S:
            kill_tagged(os.getpid(), self._spec.tag)
        elif now - self._killed_since > _SRUN_END_S and not self.is_over:
            send(self.pid, signal.SIGKILL)
        return True
