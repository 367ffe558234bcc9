"""Entries of accepted paths that earlier pipeline stages move to consecutive slots."""

from __future__ import annotations

from trimaran.worker.requests.request import RequestStatus
from trimaran.worker.scheduling.step_plan import DraftRun
from trimaran.worker.steps.step_types import Int32Array, int32s


class PathMoves:
    """The moves since the last decision, which the next decision takes along.

    The last stage moves its entries once ids are sampled. Earlier stages sample none: they move
    theirs before anything else that the next decision asks for, and therefore before a block
    is reused, copied or sent to the host.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._moves: list[tuple[int, int]] = []

    def add(self, run: DraftRun) -> None:
        """Note the moves of a run whose accepted path is known, before its sequence goes on.
        The run's start is exact, since stages await results."""
        sequence = run.sequence
        if sequence.status is not RequestStatus.RUNNING:
            return
        table, size = sequence.blocks.tables[0], self._block_size

        def slot(node: int) -> int:
            block, offset = divmod(run.start + node, size)
            return table[block] * size + offset

        self._moves += [
            (slot(node), slot(at)) for at, node in enumerate(run.path) if node != at
        ]

    def take(self) -> Int32Array:
        """See `SchedulerOutput.path_moves`."""
        moves, self._moves = self._moves, []
        return int32s(moves, 2)
