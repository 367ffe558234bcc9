"""Hidden states between pipeline stages of one host, through memory that both ranks map."""

from __future__ import annotations

import torch
from torch import Tensor

from trimaran.comm.errors import PeerLostError
from trimaran.comm.mpi import World
from trimaran.comm.stages.stage_links import (
    HiddenShape,
    StageReceiver,
    StageSender,
    sent_nothing,
    took_nothing,
)
from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.transport.shared_memory import (
    CACHE_LINE_BYTES,
    WORDS_A_LINE,
    Futex,
    SharedSegment,
    fence,
    spin_until,
)

_SPIN_S = 0.0001


_LONGEST_SLEEP_S = 0.001
"""A sleeper that misses a wake-up checks again after this time."""


SENT, FREED = 0, 1
"""The two counts: steps that were sent, and steps whose slot is free again."""


class StepCounts:
    """Two counts in memory that both ends of a link map, a line each.

    One end raises a count, the other end sleeps until the count changes.
    """

    NUM_BYTES = 2 * CACHE_LINE_BYTES

    def __init__(self, segment: SharedSegment) -> None:
        self._words = segment.words()[: 2 * WORDS_A_LINE : WORDS_A_LINE]
        addresses = (segment.address, segment.address + CACHE_LINE_BYTES)
        self._futexes = [Futex(address) for address in addresses]

    def raise_to(self, word: int, count: int) -> None:
        """Publish everything that was written before."""
        fence()
        self._words[word] = count
        self._futexes[word].wake()

    def wait_for(self, word: int, count: int, timeout_s: float) -> bool:
        """Sleep until a word has reached ``count``; False after the time limit."""
        words = self._words
        if not spin_until(lambda: bool(words[word] >= count), min(_SPIN_S, timeout_s)):
            limit = TimeLimit(timeout_s)
            while (seen := words[word]) < count:
                if limit.has_passed():
                    return False
                self._futexes[word].wait(seen, limit.sleep_s(_LONGEST_SLEEP_S))
        fence()
        return True

    def await_slot(self, num_sent: int, num_slots: int, sender: StageSender) -> None:
        """Wait until the slot of the next step is free.

        Raises:
            PeerLostError: the next stage took no step within the sender's timeout.
        """
        if not self.wait_for(FREED, num_sent - num_slots + 1, sender.timeout_s):
            raise PeerLostError(f"{took_nothing(sender)} while {num_slots} waited")

    def await_step(self, num_received: int, receiver: StageReceiver) -> None:
        """Wait until the next step was sent.

        Raises:
            PeerLostError: the preceding stage sent no step within the receiver's timeout.
        """
        if not self.wait_for(SENT, num_received + 1, receiver.timeout_s):
            raise PeerLostError(sent_nothing(receiver))


def _slots_of(segment: SharedSegment, shape: HiddenShape) -> Tensor:
    """The slots of a segment, after its counts, [slots, max tokens, D].

    The kernel allocates pages at their first write: an engine that only decodes does not pay
    for slots of prompt size.
    """
    flat = torch.frombuffer(
        segment.map,
        dtype=shape.dtype,
        count=shape.num_bytes // shape.dtype.itemsize,
        offset=StepCounts.NUM_BYTES,
    )
    return flat.view(shape.num_slots, shape.max_tokens, shape.hidden_size)


class SharedMemorySender(StageSender):
    """Copies into memory that the next stage's rank maps as well."""

    transport = "shared_memory"

    def __init__(self, segment: SharedSegment, shape: HiddenShape, timeout_s: float) -> None:
        self._counts = StepCounts(segment)
        self._slots = _slots_of(segment, shape)
        self._num_sent = 0
        self.timeout_s = timeout_s

    def send(self, hidden_TD: Tensor) -> None:
        """Hand on a step's hidden states; see `StageSender.send`."""
        num_slots = len(self._slots)
        self._counts.await_slot(self._num_sent, num_slots, self)
        slot = self._slots[self._num_sent % num_slots]
        slot[: len(hidden_TD)].copy_(hidden_TD)
        self._num_sent += 1
        self._counts.raise_to(SENT, self._num_sent)


class SharedMemoryReceiver(StageReceiver):
    """Returns the shared memory itself, without a second copy."""

    transport = "shared_memory"

    def __init__(self, segment: SharedSegment, shape: HiddenShape, timeout_s: float) -> None:
        self._counts = StepCounts(segment)
        self._slots = _slots_of(segment, shape)
        self._num_received = 0
        self.timeout_s = timeout_s

    def receive(self, num_tokens: int) -> Tensor:
        """The next step's hidden states; see `StageReceiver.receive`."""
        if self._num_received:
            # The caller has read the slot of the last call.
            self._counts.raise_to(FREED, self._num_received)
        self._counts.await_step(self._num_received, self)
        slot = self._slots[self._num_received % len(self._slots)]
        self._num_received += 1
        return slot[:num_tokens]


def connect_shared(
    stages: World, shape: HiddenShape, timeout_s: float
) -> tuple[StageReceiver | None, StageSender | None]:
    """Collective over the ranks of one pipeline; see `pipeline.connect_stages`."""
    before, behind = share_with_neighbours(stages, StepCounts.NUM_BYTES + shape.num_bytes)
    receiver = None if before is None else SharedMemoryReceiver(before, shape, timeout_s)
    sender = None if behind is None else SharedMemorySender(behind, shape, timeout_s)
    return receiver, sender


def share_with_neighbours(
    stages: World, num_bytes: int
) -> tuple[SharedSegment | None, SharedSegment | None]:
    """Memory shared with the preceding stage, and with the next; zeroed, all on one host.

    Collective over ``stages``.
    """
    before: SharedSegment | None = None
    own: SharedSegment | None = None
    if stages.rank + 1 < stages.size:
        own = SharedSegment.create(num_bytes)
    handles = stages.comm.allgather(None if own is None else own.handle)
    if stages.rank > 0:
        before = SharedSegment.attach(handles[stages.rank - 1])
        before.close_descriptor()
    stages.comm.Barrier()
    if own is not None:
        own.close_descriptor()
    return before, own
