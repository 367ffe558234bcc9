"""A ring in shared memory: one process writes messages, several read all of them."""

from __future__ import annotations

from trimaran.comm.deadlines import Backoff
from trimaran.comm.errors import PeerLostError
from trimaran.comm.time_limit import TimeLimit
from trimaran.comm.transport.shared_memory import (
    CACHE_LINE_BYTES,
    WORDS_A_LINE,
    Futex,
    SharedSegment,
    fence,
    spin_until,
)

SLOT_BYTES = 16 << 10
NUM_SLOTS = 64
SPIN_S = 0.0001
"""Seconds that a reader polls before it sleeps; longer polling takes a core from its peers."""

_MAX_SLEEP_S = 3600.0
_HAS_MORE = 1 << 63


class ShmRing:
    """Layout of the shared segment, as 64-bit words.

    Line 0 holds the number of slots ever written; its low half is the word that readers
    sleep on. Line 1 + r holds the number of slots that reader r has taken. Then follow
    the slots: one line with the payload's length and the flag of a message that goes on
    in the next slot, then the payload. A slot is overwritten once all readers took it.
    """

    def __init__(
        self,
        segment: SharedSegment,
        num_readers: int,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self._words = segment.words()
        self._bytes = memoryview(segment.map)
        self._futex = Futex(segment.address)
        self._num_readers = num_readers
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._first_slot = (1 + num_readers) * CACHE_LINE_BYTES

    @staticmethod
    def segment_bytes(
        num_readers: int, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS
    ) -> int:
        """Memory that a ring of this shape needs."""
        return (1 + num_readers) * CACHE_LINE_BYTES + num_slots * (
            CACHE_LINE_BYTES + slot_bytes
        )

    def _slot_offset(self, count: int) -> int:
        stride = CACHE_LINE_BYTES + self._slot_bytes
        return self._first_slot + (count % self._num_slots) * stride

    def _reader_word(self, reader: int) -> int:
        return (1 + reader) * WORDS_A_LINE


class RingWriter(ShmRing):
    """The writing end. One thread only."""

    def write(self, payload: bytes, timeout_s: float) -> None:
        """Append one message and wake the readers that sleep.

        Blocks only while the slowest reader is a whole ring behind.

        Raises:
            PeerLostError: a reader stayed a whole ring behind for ``timeout_s``.
        """
        limit = TimeLimit(timeout_s)
        view = memoryview(payload)
        start = 0
        while True:
            chunk = view[start : start + self._slot_bytes]
            start += len(chunk)
            self._write_slot(chunk, start < len(view), limit)
            if start >= len(view):
                return

    @property
    def num_free(self) -> int:
        """Slots that can be written without waiting for a reader."""
        readers = range(self._num_readers)
        oldest: int = min(self._words[self._reader_word(reader)] for reader in readers)
        return self._num_slots - (self._words[0] - oldest)

    def _write_slot(self, chunk: memoryview, has_more: bool, limit: TimeLimit) -> None:
        count = self._words[0]
        self._wait_for_room(count, limit)
        offset = self._slot_offset(count)
        self._words[offset // 8] = len(chunk) | (_HAS_MORE if has_more else 0)
        begin = offset + CACHE_LINE_BYTES
        self._bytes[begin : begin + len(chunk)] = chunk
        fence()
        self._words[0] = count + 1
        self._futex.wake()

    def _wait_for_room(self, count: int, limit: TimeLimit) -> None:
        oldest = count - self._num_slots + 1
        backoff: Backoff | None = None
        while late := [
            reader
            for reader in range(self._num_readers)
            if self._words[self._reader_word(reader)] < oldest
        ]:
            if limit.has_passed():
                raise PeerLostError(
                    f"reader(s) {late} of the control ring took nothing for too long while "
                    f"{self._num_slots} slots waited"
                )
            backoff = backoff or Backoff()
            backoff.pause()
        fence()


class RingReader(ShmRing):
    """One reading end. One thread only."""

    def __init__(
        self,
        segment: SharedSegment,
        num_readers: int,
        reader: int,
        slot_bytes: int = SLOT_BYTES,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        super().__init__(segment, num_readers, slot_bytes, num_slots)
        self._own_word = self._reader_word(reader)
        self._taken = 0

    def has_message(self) -> bool:
        """Whether `read` would return a message at once."""
        return self._has_slot()

    def read(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None if no message begins within ``timeout_s`` (None: no limit).

        Polls for `SPIN_S`, then sleeps in the kernel.

        Raises:
            PeerLostError: the writer stopped in the middle of a message.
        """
        limit = float("inf") if timeout_s is None else timeout_s
        if not self._wait_for_slot(limit):
            return None
        chunk, has_more = self._take_slot()
        if not has_more:
            return chunk
        chunks = [chunk]
        while has_more:
            if not self._wait_for_slot(limit):
                raise PeerLostError("the writer of the control ring stopped inside a message")
            chunk, has_more = self._take_slot()
            chunks.append(chunk)
        return b"".join(chunks)

    def _has_slot(self) -> bool:
        return bool(self._words[0] != self._taken)

    def _wait_for_slot(self, limit_s: float) -> bool:
        if spin_until(self._has_slot, min(SPIN_S, limit_s)):
            return True
        limit = TimeLimit(limit_s)
        while not self._has_slot():
            if limit.has_passed():
                return False
            self._futex.wait(self._taken, limit.sleep_s(_MAX_SLEEP_S))
        return True

    def _take_slot(self) -> tuple[bytes, bool]:
        fence()
        offset = self._slot_offset(self._taken)
        header = self._words[offset // 8]
        begin = offset + CACHE_LINE_BYTES
        chunk = bytes(self._bytes[begin : begin + (header & ~_HAS_MORE)])
        fence()
        self._taken += 1
        self._words[self._own_word] = self._taken
        return chunk, bool(header & _HAS_MORE)
