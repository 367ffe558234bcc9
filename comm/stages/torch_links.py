"""Hidden states between pipeline stages over torch.distributed: NCCL, or gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.comm.collectives.torch_groups import connect_store, prepare_nccl
from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.stages.stage_links import (
    HiddenShape,
    StageReceiver,
    StageSender,
    sent_nothing,
    took_nothing,
)

_TAG = 0
# torch exports them without saying so in its type hints.
_torch_distributed: Any = dist


class _Slots:
    """Slots for hidden states, used in turn, each with its last transfer."""

    def __init__(self, shape: HiddenShape, device: torch.device) -> None:
        self._memory = shape.empty(device)
        self._works: list[Any] = [None] * shape.num_slots
        self._turn = -1

    def next(self) -> tuple[int, Tensor, Any]:
        """The next slot, its memory, and the transfer that must end before its use."""
        self._turn = (self._turn + 1) % len(self._works)
        return self._turn, self._memory[self._turn], self._works[self._turn]

    def keep(self, number: int, work: Any) -> None:
        """Keep the transfer of a slot."""
        self._works[number] = work


def _guarded(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RuntimeError as error:
        raise PeerLostError(f"{what}: {error}") from error


# ---- CPU ranks of several hosts ---------------------------------------------------------


class GlooSender(StageSender):
    """Over TCP; a thread of gloo's own moves the bytes."""

    transport = "gloo"

    def __init__(self, group: Any, rank: int, shape: HiddenShape, timeout_s: float) -> None:
        self._group = group
        self._next = rank + 1
        self._slots = _Slots(shape, torch.device("cpu"))
        self.timeout_s = timeout_s

    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states; see `StageSender.send`."""
        number, memory, work = self._slots.next()
        what = took_nothing(self)
        if work is not None:
            _guarded(what, lambda: work.wait(timedelta(seconds=self.timeout_s)))
        slot = memory[: len(hidden_TD)].copy_(hidden_TD)
        self._slots.keep(
            number, _guarded(what, lambda: self._group.send([slot], self._next, _TAG))
        )


class GlooReceiver(StageReceiver):
    """The other end of `GlooSender`."""

    transport = "gloo"

    def __init__(self, group: Any, rank: int, shape: HiddenShape, timeout_s: float) -> None:
        self._group = group
        self._previous = rank - 1
        self._slots = _Slots(shape, torch.device("cpu"))
        self.timeout_s = timeout_s

    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states; see `StageReceiver.receive`."""
        _, memory, _ = self._slots.next()
        slot = memory[:num_tokens]

        def take() -> None:
            work = self._group.recv([slot], self._previous, _TAG)
            work.wait(timedelta(seconds=self.timeout_s))

        _guarded(sent_nothing(self), take)
        return slot


def connect_gloo(
    stages: World, shape: HiddenShape, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """Collective over the ranks of one pipeline; see `pipeline.connect_stages`."""
    store = connect_store(stages, timeout_s)
    limit = timedelta(seconds=timeout_s)
    group = _torch_distributed.ProcessGroupGloo(store, stages.rank, stages.size, limit)
    is_first, is_last = stages.rank == 0, stages.rank == stages.size - 1
    receiver = None if is_first else GlooReceiver(group, stages.rank, shape, timeout_s)
    sender = None if is_last else GlooSender(group, stages.rank, shape, timeout_s)
    return receiver, sender


# ---- GPUs -------------------------------------------------------------------------------

_MAX_BLOCKS = 8
"""Thread blocks of a transfer. More would not noticeably speed up a step, and each occupies a
multiprocessor that other kernels need."""


class _NcclPairs:
    """The process group of a rank's two ends: NCCL's communicators, one a pair of stages."""

    def __init__(
        self, stages: World, shape: HiddenShape, device: torch.device, timeout_s: float
    ) -> None:
        prepare_nccl(stages.root)
        store = connect_store(stages, timeout_s)
        options = _torch_distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.max_ctas = _MAX_BLOCKS
        self._group = _torch_distributed.ProcessGroupNCCL(
            store, stages.rank, stages.size, options
        )
        self._is_open = True
        self.rank = stages.rank
        self.shape = shape
        self.device = device
        self.timeout_s = timeout_s

    def send(self, hidden: Tensor, rank: int) -> Any:
        """Enqueue a transfer after the current stream's work; returns its handle."""
        what = f"the next pipeline stage takes no hidden states on {self.device}"
        return _guarded(what, lambda: self._group.send([hidden], rank, _TAG))

    def receive(self, hidden: Tensor, rank: int) -> None:
        """Enqueue a transfer on the current stream."""
        what = f"the pipeline stage before sends no hidden states to {self.device}"
        _guarded(what, lambda: self._group.recv([hidden], rank, _TAG).wait())

    def close(self) -> None:
        """Free the communicators, once for both ends."""
        if self._is_open:
            self._is_open = False
            self._group.shutdown()


class NcclSender(StageSender):
    """Enqueues the transfer beside the computation; the host does not wait.

    A transfer runs on its own stream, after the copy to its slot.
    """

    transport = "nccl"

    def __init__(self, pairs: _NcclPairs) -> None:
        self._pairs = pairs
        self._slots = _Slots(pairs.shape, pairs.device)
        self.timeout_s = pairs.timeout_s

    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states; see `StageSender.send`."""
        number, memory, work = self._slots.next()
        if work is not None:
            # Only the device waits, and only if all slots are unread by the next stage.
            work.wait()
        slot = memory[: len(hidden_TD)].copy_(hidden_TD)
        self._slots.keep(number, self._pairs.send(slot, self._pairs.rank + 1))

    def close(self) -> None:
        """Free what this end holds."""
        self._pairs.close()


class NcclReceiver(StageReceiver):
    """Enqueues the transfer after all earlier steps.

    A concurrent transfer that waits for its sender would occupy multiprocessors of the GPU, and
    a kernel with one block for each multiprocessor would take twice as long. Sent data is
    already in NCCL's buffers on this GPU, so the transfer is short when it runs.
    """

    transport = "nccl"

    def __init__(self, pairs: _NcclPairs) -> None:
        self._pairs = pairs
        # The readers of the buffer run on the stream that the next transfer waits for.
        self._slot = pairs.shape.empty(pairs.device, 1)[0]
        self.timeout_s = pairs.timeout_s

    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states; see `StageReceiver.receive`."""
        slot = self._slot[:num_tokens]
        self._pairs.receive(slot, self._pairs.rank - 1)
        return slot

    def close(self) -> None:
        """Free what this end holds."""
        self._pairs.close()


def connect_nccl(
    stages: World, shape: HiddenShape, device: torch.device, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """Collective over the ranks of one pipeline; see `pipeline.connect_stages`."""
    pairs = _NcclPairs(stages, shape, device, timeout_s)
    receiver = None if stages.rank == 0 else NcclReceiver(pairs)
    sender = None if stages.rank == stages.size - 1 else NcclSender(pairs)
    # NCCL connects a pair at its first transfer, so make one here rather than in a step.
    # Receive first, because the preceding stage sends first.
    if receiver is not None:
        receiver.receive(1)
    if sender is not None:
        sender.send(torch.zeros((1, shape.hidden_size), dtype=shape.dtype, device=device))
    torch.cuda.synchronize(device)
    return receiver, sender
