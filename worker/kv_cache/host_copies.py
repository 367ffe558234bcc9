"""Copies of KV blocks between this rank's device and host memory, concurrent with steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from trimaran.kernels.kv_quantization import as_bytes
from trimaran.worker.kv_cache.host_memory import CudaLocks, HostMemory
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import Int32Array, TransferKind

# Shapes: S slots of the host, E elements of a block, P blocks of half a staging buffer.


class HostCopies:
    """One KV group's host memory, [S, E], and the copies to and from it.

    On a GPU the copies run on their own stream. A step soon overwrites evicted blocks, so it
    first gathers them into a staging buffer; the copy stream then does the slow copy to the
    host. Blocks that a load overwrites need no staging, because the copy stream runs in order.
    The device waits for copies only if the decision demands a wait, or if evictions are faster
    than the copies to the host. The host never waits.
    """

    def __init__(self, pool: Tensor, num_slots: int, num_staged: int) -> None:
        """``pool`` [blocks, ...] is dense; at most ``num_staged`` blocks are staged."""
        pool = as_bytes(pool)
        self._blocks = pool.view(pool.shape[0], -1)
        self._is_gpu = pool.device.type == "cuda"
        width = self._blocks.shape[1]
        locks = CudaLocks(pool.device) if self._is_gpu else None
        self._memory = HostMemory(num_slots, width * pool.element_size(), locks)
        self._host = self._memory.rows(pool.dtype)
        self._done_step = 0
        if not self._is_gpu:
            return
        self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        half = -(-num_staged // 2)
        self._staging = torch.empty((2, half, width), dtype=pool.dtype, device=pool.device)
        self._drained: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._loads: deque[tuple[int, torch.cuda.Event]] = deque()
        self._last_loads: dict[int, torch.cuda.Event] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._host.nbytes

    @property
    def done_step(self) -> int:
        """The last step such that the loads of this step and of all earlier steps are
        complete.
        """
        while self._is_gpu and self._loads and _is_over(self._loads[0][1]):
            self._done_step = self._loads.popleft()[0]
        return self._done_step

    def begin(self, step: int, transfers: Int32Array) -> None:
        """Start a step's copies of this group, before any other work of the step."""
        kinds, pairs = transfers[:, 0], transfers[:, 2:]
        moves, loads = pairs[kinds == TransferKind.MOVE], pairs[kinds == TransferKind.LOAD]
        if not self._is_gpu:
            self._host[moves[:, 1].tolist()] = self._blocks[moves[:, 0].tolist()]
            self._blocks[loads[:, 1].tolist()] = self._host[loads[:, 0].tolist()]
            self._done_step = step
            return
        is_direct = (moves[:, :1] == loads[:, 1]).any(1)
        self._move_staged(moves[~is_direct])
        # Earlier steps' work on these blocks comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            for block, slot in moves[is_direct].tolist():
                self._host[slot].copy_(self._blocks[block], non_blocking=True)
            for slot, block in loads.tolist():
                self._blocks[block].copy_(self._host[slot], non_blocking=True)
        if len(loads):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._loads.append((step, event))
            self._last_loads[step] = event

    def wait(self, step: int) -> None:
        """Let the device run later launches only after the loads of ``step``."""
        if not self._is_gpu:
            return
        stream = torch.cuda.current_stream(self._blocks.device)
        for number in [number for number in self._last_loads if number <= step]:
            stream.wait_event(self._last_loads.pop(number))

    def close(self) -> None:
        """Free the memory. The device must have finished all copies."""
        self._memory.close()
        del self._host, self._memory

    def _move_staged(self, moves: Int32Array) -> None:
        main = torch.cuda.current_stream(self._blocks.device)
        half = self._staging.shape[1]
        for first in range(0, len(moves), half):
            piece = moves[first : first + half]
            self._turn = 1 - self._turn
            drained = self._drained[self._turn]
            if drained is not None:
                main.wait_event(drained)
            staged = self._staging[self._turn, : len(piece)]
            blocks = to_device(piece[:, 0].astype("int64"), self._blocks.device)
            torch.index_select(self._blocks, 0, blocks, out=staged)
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                for index, slot in enumerate(piece[:, 1].tolist()):
                    self._host[slot].copy_(staged[index], non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._drained[self._turn] = event


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def begin_transfers(hosts: Sequence[HostCopies], step: int, transfers: Int32Array) -> None:
    """Start a step's copies in all groups, and let the device wait for earlier loads."""
    kinds = transfers[:, 0]
    for group, host in enumerate(hosts):
        of_group = (transfers[:, 1] == group) & (kinds != TransferKind.WAIT)
        if of_group.any():
            host.begin(step, transfers[of_group])
        for awaited in transfers[kinds == TransferKind.WAIT, 1].tolist():
            host.wait(awaited)
