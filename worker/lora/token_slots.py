"""The adapter slot of each token of a step, on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimaran.worker.steps.step_types import Int32Array, SchedulerOutput

# Shapes: T tokens of the step, G blocks of tokens with one adapter, M tokens of a block.

NO_SLOT = -1


class RowSlots:
    """The adapter slot of every row; `NO_SLOT` for a row without an adapter."""

    def __init__(self, num_rows: int) -> None:
        self._slots = np.full(num_rows, NO_SLOT, dtype=np.int32)
        self._num_used = 0

    @property
    def is_used(self) -> bool:
        """Whether any row has an adapter."""
        return self._num_used > 0

    def set(self, row: int, slot: int) -> None:
        """Set a row's adapter slot; `NO_SLOT` removes it."""
        self._num_used += int(slot != NO_SLOT) - int(self._slots[row] != NO_SLOT)
        self._slots[row] = slot

    def of_tokens(self, decision: SchedulerOutput) -> Int32Array | None:
        """The slot of every token of a step; None if no token has an adapter."""
        slots = self._slots[decision.rows]
        if (slots == NO_SLOT).all():
            return None
        return np.repeat(slots, decision.num_scheduled_tokens)


def tokens_by_slot(slots_T: Int32Array) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """The slots in use, ascending, each with the indices of its tokens."""
    return [(int(slot), np.flatnonzero(slots_T == slot)) for slot in _used(slots_T)]


def token_blocks(slots_T: Int32Array, block_size: int) -> tuple[Int32Array, Int32Array]:
    """Blocks of tokens that share an adapter: tokens [G, M], padded with -1, and each block's
    slot [G]."""
    order = np.argsort(slots_T, kind="stable")
    order = order[np.searchsorted(slots_T[order], 0) :]
    used, counts = np.unique(slots_T[order], return_counts=True)
    num_blocks = -(-counts // block_size)
    tokens = np.full((int(num_blocks.sum()), block_size), -1, dtype=np.int32)
    first_indices = (np.cumsum(num_blocks) - num_blocks) * block_size
    first_tokens = np.cumsum(counts) - counts
    indices = np.arange(len(order)) + np.repeat(first_indices - first_tokens, counts)
    tokens.reshape(-1)[indices] = order
    return tokens, np.repeat(used, num_blocks).astype(np.int32)


def _used(slots_T: Int32Array) -> npt.NDArray[np.int32]:
    used: npt.NDArray[np.int32] = np.unique(slots_T)
    found: npt.NDArray[np.int32] = used[used != NO_SLOT]
    return found
