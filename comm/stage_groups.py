"""Pipeline stages that hand hidden states on over torch.distributed: NCCL, or gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.process_group import MULTICAST_OFF, connect_store
from trimaran.comm.stage_link import HiddenShape, StageReceiver, StageSender

_TAG = 0
# torch exports them without saying so in its type hints.
_torch_distributed: Any = dist


class _Slots:
    """Places for hidden states in turn, each with the transfer that last used it."""

    def __init__(self, shape: HiddenShape, device: torch.device) -> None:
        self._memory = shape.empty(device)
        self._works: list[Any] = [None] * shape.num_slots
        self._turn = -1

    def next(self) -> tuple[int, Tensor, Any]:
        """The next place, its memory, and what must be over before it is used."""
        self._turn = (self._turn + 1) % len(self._works)
        return self._turn, self._memory[self._turn], self._works[self._turn]

    def keep(self, place: int, work: Any) -> None:
        """Remember the transfer of a place."""
        self._works[place] = work


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
        place, memory, work = self._slots.next()
        what = (
            f"the next pipeline stage, on another host, took no step for {self.timeout_s:g} s"
        )
        if work is not None:
            _guarded(what, lambda: work.wait(timedelta(seconds=self.timeout_s)))
        slot = memory[: len(hidden_TD)].copy_(hidden_TD)
        self._slots.keep(
            place, _guarded(what, lambda: self._group.send([slot], self._next, _TAG))
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

        _guarded(
            "the pipeline stage before, on another host, sent no hidden states for "
            f"{self.timeout_s:g} s",
            take,
        )
        return slot


def connect_gloo(
    stages: World, shape: HiddenShape, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """Collective over the ranks of one pipeline; see `stage_link.connect_stages`."""
    store = connect_store(stages, timeout_s)
    limit = timedelta(seconds=timeout_s)
    group = _torch_distributed.ProcessGroupGloo(store, stages.rank, stages.size, limit)
    is_first, is_last = stages.rank == 0, stages.rank == stages.size - 1
    receiver = None if is_first else GlooReceiver(group, stages.rank, shape, timeout_s)
    sender = None if is_last else GlooSender(group, stages.rank, shape, timeout_s)
    return receiver, sender


# ---- GPUs -------------------------------------------------------------------------------


class NcclSender(StageSender):
    """Enqueues the transfer beside what the device computes; the host waits for nothing.

    A transfer runs on a stream of its own, behind the copy into its slot.
    """

    transport = "nccl"

    def __init__(
        self, group: Any, rank: int, shape: HiddenShape, device: torch.device, timeout_s: float
    ) -> None:
        self._group = group
        self._next = rank + 1
        self._slots = _Slots(shape, device)
        self.timeout_s = timeout_s

    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states; see `StageSender.send`."""
        place, memory, work = self._slots.next()
        if work is not None:
            # The device waits, and only if the next stage is slots behind.
            work.wait()
        slot = memory[: len(hidden_TD)].copy_(hidden_TD)
        self._slots.keep(place, self._group.send([slot], self._next, _TAG))


class NcclReceiver(StageReceiver):
    """Enqueues the transfer on a stream that does not wait for the step before."""

    transport = "nccl"

    def __init__(
        self, group: Any, rank: int, shape: HiddenShape, device: torch.device, timeout_s: float
    ) -> None:
        self._group = group
        self._previous = rank - 1
        self._slots = _Slots(shape, device)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read = [torch.cuda.Event() for _ in range(shape.num_slots)]  # type: ignore[no-untyped-call]
        self._last: int | None = None
        self.timeout_s = timeout_s

    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states; see `StageReceiver.receive`."""
        if self._last is not None:
            self._read[self._last].record(torch.cuda.current_stream(self._device))
        place, memory, _ = self._slots.next()
        slot = memory[:num_tokens]
        with torch.cuda.stream(self._stream):
            # Of the step that used the place last; an event never recorded is no wait.
            self._stream.wait_event(self._read[place])
            work = self._group.recv([slot], self._previous, _TAG)
        work.wait()
        self._last = place
        return slot


def connect_nccl(
    stages: World, shape: HiddenShape, device: torch.device, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """Collective over the ranks of one pipeline; see `stage_link.connect_stages`.

    A group of its own: NCCL makes a communicator, and so a stream, for each pair of stages.
    """
    for name, value in MULTICAST_OFF.items():
        os.environ.setdefault(name, value)
    store = connect_store(stages, timeout_s)
    options = _torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = _torch_distributed.ProcessGroupNCCL(store, stages.rank, stages.size, options)
    is_first, is_last = stages.rank == 0, stages.rank == stages.size - 1
    ends = (group, stages.rank, shape, device, timeout_s)
    receiver = None if is_first else NcclReceiver(*ends)
    sender = None if is_last else NcclSender(*ends)
    return receiver, sender
