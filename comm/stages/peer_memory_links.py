"""Hidden states from GPU to GPU of one host, by copies into memory that both stages map."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from trimaran.comm.collectives.torch_groups import (
    NcclGroup,
    PeerMemory,
    map_peer_memory,
    why_memory_is_apart,
)
from trimaran.comm.errors import ConfigError
from trimaran.comm.mpi import World
from trimaran.comm.stages.shared_memory_links import (
    FREED,
    SENT,
    StepCounts,
    share_with_neighbours,
)
from trimaran.comm.stages.stage_links import HiddenShape, StageReceiver, StageSender
from trimaran.comm.transport.shared_memory import SharedSegment

logger = logging.getLogger(__name__)

# A GPU waits only for work that has been launched on its peer. A kernel that waits for its peer
# blocks every operation of its own host that needs an idle device, such as loading another
# kernel; a host that waits for the other host in such an operation could deadlock. Hence the
# counts in shared memory: a host launches the wait for a step once the stage before has
# launched its send, and the wait for a slot once the next stage has launched its release. The
# devices then exchange signals, numbered by slots: for a sent step in the memory of the
# receiver, for a free slot in that of the sender.


class _Mapped:
    """The slots of a rank for hidden states, mapped by its peers, and the signals."""

    def __init__(self, group: NcclGroup, memory: PeerMemory, shape: HiddenShape) -> None:
        self.rank = group.rank
        self._group: NcclGroup | None = group
        self._memory: PeerMemory | None = memory
        self._sizes = (shape.num_slots, shape.max_tokens, shape.hidden_size)
        self._dtype = shape.dtype

    def own_slots(self) -> Tensor:
        """The slots of this rank, [slots, max tokens, D]."""
        assert self._memory is not None
        return self._memory.own.view(self._dtype).view(self._sizes)

    def slots_of(self, rank: int) -> Tensor:
        """The slots of another rank, which copies on this rank's GPU may write."""
        assert self._memory is not None
        handle = self._memory.handle
        first = self._memory.addresses[rank] - int(handle.buffer_ptrs[rank])
        slots: Tensor = handle.get_buffer(
            rank, self._sizes, self._dtype, first // self._dtype.itemsize
        )
        return slots

    def signal(self, rank: int, number: int) -> None:
        """Signal a rank's GPU once the work on the current stream so far is done."""
        assert self._memory is not None
        self._memory.handle.put_signal(rank, channel=number)

    def await_signal(self, rank: int, number: int) -> None:
        """Let the current stream wait for a rank's signal and consume it."""
        assert self._memory is not None
        self._memory.handle.wait_signal(rank, channel=number)

    def close(self) -> None:
        """Free the memory and the group, once for both ends."""
        group, self._group, self._memory = self._group, None, None
        if group is not None:
            group.close()


class PeerSender(StageSender):
    """Copies into the next stage's GPU on the current stream."""

    transport = "peer"

    def __init__(self, mapped: _Mapped, segment: SharedSegment, timeout_s: float) -> None:
        self._mapped = mapped
        self._next = mapped.rank + 1
        self._slots = mapped.slots_of(self._next)
        self._counts = StepCounts(segment)
        self._num_sent = 0
        self.timeout_s = timeout_s

    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states; see `StageSender.send`."""
        num_slots = len(self._slots)
        slot = self._num_sent % num_slots
        self._counts.await_slot(self._num_sent, num_slots, self)
        if self._num_sent >= num_slots:
            self._mapped.await_signal(self._next, slot)
        self._slots[slot, : len(hidden_TD)].copy_(hidden_TD)
        self._mapped.signal(self._next, slot)
        self._num_sent += 1
        self._counts.raise_to(SENT, self._num_sent)

    def close(self) -> None:
        """Free what this end holds."""
        self._slots = self._slots.new_empty(0)
        self._mapped.close()


class PeerReceiver(StageReceiver):
    """Returns the mapped memory itself, without a second copy."""

    transport = "peer"

    def __init__(self, mapped: _Mapped, segment: SharedSegment, timeout_s: float) -> None:
        self._mapped = mapped
        self._previous = mapped.rank - 1
        self._slots = mapped.own_slots()
        self._counts = StepCounts(segment)
        self._num_received = 0
        self.timeout_s = timeout_s

    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states; see `StageReceiver.receive`."""
        num_slots = len(self._slots)
        if self._num_received:
            # The readers of the last slot have been launched on this stream by now.
            self._mapped.signal(self._previous, (self._num_received - 1) % num_slots)
            self._counts.raise_to(FREED, self._num_received)
        self._counts.await_step(self._num_received, self)
        slot = self._num_received % num_slots
        self._mapped.await_signal(self._previous, slot)
        self._num_received += 1
        return self._slots[slot, :num_tokens]

    def close(self) -> None:
        """Free what this end holds."""
        self._slots = self._slots.new_empty(0)
        self._mapped.close()


def connect_peers(
    stages: World, shape: HiddenShape, device: torch.device, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None] | None:
    """See `pipeline.connect_stages`; None if the GPUs do not map each other's memory.

    Raises:
        ConfigError: a GPU reads values that differ from those that the previous stage's GPU
        wrote.
    """
    group = NcclGroup(stages, device, timeout_s, timeout_s)
    memory = _memory(stages, group, shape)
    if memory is None:
        group.close()
        return None
    mapped = _Mapped(group, memory, shape)
    before, behind = share_with_neighbours(stages, StepCounts.NUM_BYTES)
    receiver = None if before is None else PeerReceiver(mapped, before, timeout_s)
    sender = None if behind is None else PeerSender(mapped, behind, timeout_s)
    _try_all(receiver, sender, shape, device)
    return receiver, sender


def _memory(stages: World, group: NcclGroup, shape: HiddenShape) -> PeerMemory | None:
    """Slots on every GPU; None on all ranks if one of them finds an obstacle. Collective."""
    memory: PeerMemory | None = None
    reason = why_memory_is_apart(group)
    if not any(stages.comm.allgather(reason)):
        try:
            memory = map_peer_memory(group, shape.num_bytes)
        except ConfigError as error:
            reason = str(error)
    reasons = [each for each in stages.comm.allgather(reason) if each]
    if reasons:
        logger.info("stages send over NCCL: %s", reasons[0])
        return None
    return memory


def _try_all(
    receiver: PeerReceiver | None,
    sender: PeerSender | None,
    shape: HiddenShape,
    device: torch.device,
) -> None:
    """Use every slot, and the first one again: kernels that load at first use load here."""
    size = (1, shape.hidden_size)
    for number in range(1, shape.num_slots + 2):
        told = torch.full(size, float(number), dtype=shape.dtype, device=device)
        if receiver is not None and not torch.equal(receiver.receive(1), told):
            raise ConfigError(
                f"{device} read other hidden states than the GPU of the stage before wrote: "
                "their link is faulty. Choose other GPUs (CUDA_VISIBLE_DEVICES)."
            )
        if sender is not None:
            sender.send(told)
    torch.cuda.synchronize(device)
