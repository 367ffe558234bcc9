"""Sequences that wait until the host's copy of their prefix is on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from trimaran.worker.request import Sequence


class Loads:
    """Sequences that have a row and blocks, and whose blocks are being copied from the host.

    They are no part of a step until then, so that nobody waits for their copies. Copies are
    begun in order of steps and end in it.
    """

    def __init__(self) -> None:
        self.done_step = 0
        """The copies of all steps up to this one are made."""
        self._under_way: deque[tuple[int, Sequence]] = deque()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._under_way)

    def add(self, sequence: Sequence, step: int) -> None:
        """The copies for ``sequence`` begin with this step."""
        self._under_way.append((step, sequence))

    def take(self, *, is_urgent: bool) -> tuple[int, Sequence] | None:
        """A sequence whose copies are made, and their step; None if there is none.

        If it ``is_urgent`` the first one is taken even so: then the device is to wait.
        """
        if not self._under_way:
            return None
        if self._under_way[0][0] > self.done_step and not is_urgent:
            return None
        return self._under_way.popleft()
