"""The rank's end of a process that compiles one guide, and then fills masks for its outputs."""

from __future__ import annotations

import mmap
import select
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import CancelledError
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.worker.guided.guide_process import (
    BEGUN,
    COMPLETE,
    NUM_SLOTS,
    REJECTED,
    TOO_LARGE,
    Question,
)

_POLL_S = 0.05
"""Seconds between checks that a request still wants its guide compiled."""

_HANG_FACTOR = 10
"""A process that answers nothing for this many times the limit of a mask has hung."""

_PATIENCE_S = 0.02
_REGAINED_S = 0.0001
"""Each mask that comes in time regains so much of the patience."""


class TooSlowError(Exception):
    """The compilation of a guide exceeds its time limit."""


class ProcessEndedError(Exception):
    """The process ended unexpectedly. ``has_begun`` is true if the process had started with
    a guide.
    """

    def __init__(self, *, has_begun: bool) -> None:
        super().__init__(has_begun)
        self.has_begun = has_begun


class AwaitsMask(Protocol):
    """The requester of masks: `guide.Guide`."""

    number: int
    """Names the output in the process."""

    end_id: int
    error: RequestError | None

    def accept_masks(
        self, masks: npt.NDArray[np.int32], seconds: float, *, is_complete: bool
    ) -> None:
        """Accept a mask, and the masks after leading draft ids: [1 to n, words].

        ``seconds`` is the time of a slow first mask, 0 for a quick mask.
        """
        ...


class Lender(Protocol):
    """The lender of processes: `process_pool.GuideProcesses`."""

    @property
    def is_exhausted(self) -> bool:
        """Whether as many processes are lent as may be."""
        ...

    def release(self, process: MaskProcess) -> None:
        """A request returns a lent process."""
        ...


class MaskProcess:
    """Compiles a guide for one thread, then fills masks for the engine's thread.

    No call but `compile` blocks: at most one batch of questions is under way, and the masks of
    its answers lie in memory that both processes map. The kernel ends the process when one
    mask takes more processor time than its limit.
    """

    def __init__(
        self,
        connection: Connection,
        masks: mmap.mmap,
        step_timeout_s: float,
        lender: Lender,
    ) -> None:
        """``masks`` has room for `NUM_SLOTS` masks."""
        self._connection = connection
        self._masks = np.frombuffer(masks, np.int32).reshape(NUM_SLOTS, -1)
        self._step_timeout_s = step_timeout_s
        self._lender = lender
        self.num_bytes = 0
        """Memory of its own after the last guide was compiled."""
        self.idle_since = 0.0
        """When the last request returned it, on the monotonic clock."""
        self.has_ended = False
        self.patience_s = _PATIENCE_S
        """How long steps may still wait for masks of this process, all together."""
        self._queued: dict[int, tuple[AwaitsMask, List[int], List[int]]] = {}
        self._asked: dict[int, AwaitsMask | None] = {}
        """By slot, the open questions of the batch in progress; None for dropped outputs."""
        self._asked_at = 0.0
        self._dropped: list[int] = []

    # ---- compile -------------------------------------------------------------------------

    def compile(
        self, kind: str, guide: str, seconds: float, is_wanted: Callable[[], bool]
    ) -> None:
        """Compile ``guide`` within a time limit. After an error other than RequestError the
        process must be closed.

        Raises:
            RequestError: the guide cannot be compiled.
            TooSlowError: the time limit has passed.
            CancelledError: the request was cancelled.
            ProcessEndedError: the process ended.
        """
        has_begun = False
        self._dropped.clear()
        try:
            self._connection.send(("compile", kind, guide, seconds))
            self._wait(None, is_wanted)
            has_begun = self._connection.recv_bytes() == BEGUN
            self._wait(time.monotonic() + seconds, is_wanted)
            answer = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            raise ProcessEndedError(has_begun=has_begun) from None
        if answer == TOO_LARGE:
            raise ProcessEndedError(has_begun=True)
        if not answer.isdecimal():
            raise RequestError(answer)
        self.num_bytes = int(answer)

    def _wait(self, end: float | None, is_wanted: Callable[[], bool]) -> None:
        """Return when an answer has arrived, or when the process has ended."""
        while not self._connection.poll(_POLL_S):
            if not is_wanted():
                raise CancelledError
            if end is not None and time.monotonic() > end:
                raise TooSlowError

    # ---- masks ---------------------------------------------------------------------------

    def ask(self, guide: AwaitsMask, token_ids: List[int], draft_ids: List[int] = ()) -> None:
        """Queue a question: the mask of ``guide`` after these further ids, and the masks after
        each of the draft ids behind these ids, as far as the guide allows the draft ids."""
        if self.has_ended:
            guide.error = self._ended_error()
        else:
            self._queued[guide.number] = guide, token_ids, draft_ids

    def drop(self, guide: AwaitsMask) -> None:
        """Remove an output and its pending questions."""
        self._queued.pop(guide.number, None)
        self._dropped.append(guide.number)
        for slot, each in self._asked.items():
            if each is guide:
                self._asked[slot] = None

    def release(self) -> None:
        """A request that the process was lent to is over."""
        self._lender.release(self)

    @property
    def is_wanted_elsewhere(self) -> bool:
        """Whether guides may wait for a process."""
        return self._lender.is_exhausted

    def flush(self) -> None:
        """Send what is queued, unless an earlier batch is under way."""
        if self._asked or not self._queued or self.has_ended:
            return
        batch = list(self._queued.values())[:NUM_SLOTS]
        # Masks of draft ids take the slots that the first masks leave.
        most = (NUM_SLOTS - len(batch)) // len(batch)
        questions: list[Question] = []
        slot = 0
        for guide, ids, drafts in batch:
            del self._queued[guide.number]
            self._asked[slot] = guide
            questions.append((guide.number, guide.end_id, [*ids], [*drafts[:most]], slot))
            slot += 1 + len(questions[-1][3])
        self._asked_at = time.monotonic()
        dropped, self._dropped = self._dropped, []
        try:
            self._connection.send(("masks", questions, dropped))
        except OSError:
            self._end()

    def receive(self) -> None:
        """Take in the answers that are here, and send the next batch."""
        try:
            while self._asked and self._connection.poll():
                self._take(np.frombuffer(self._connection.recv_bytes(), np.int64))
        except (EOFError, OSError):
            self._end()
        if self._asked and time.monotonic() - self._asked_at > self._hang_s:
            self._end()
        self.flush()

    def _take(self, answers: npt.NDArray[np.int64]) -> None:
        for slot, status, micros, num_drafts in answers.reshape(-1, 4).tolist():
            guide = self._asked.pop(slot)
            if guide is None:
                continue
            if status <= REJECTED:
                index = REJECTED - status
                guide.error = RequestError(
                    f"the id at index {index} of the output does not follow the guide"
                )
                continue
            masks = self._masks[slot : slot + 1 + num_drafts].copy()
            guide.accept_masks(masks, micros / 1e6, is_complete=status == COMPLETE)
        self._asked_at = time.monotonic()
        self.patience_s = min(_PATIENCE_S, self.patience_s + _REGAINED_S)

    @property
    def _hang_s(self) -> float:
        return _HANG_FACTOR * self._step_timeout_s

    def _end(self) -> None:
        """The process has ended, and all its outputs are lost."""
        waited_s = time.monotonic() - self._asked_at
        self.has_ended = True
        self._connection.close()
        queued = [guide for guide, *_ in self._queued.values()]
        error = self._ended_error(is_slow=waited_s >= self._step_timeout_s * 0.9)
        for guide in filter(None, [*self._asked.values(), *queued]):
            guide.error = error
        self._asked, self._queued = {}, {}

    def _ended_error(self, *, is_slow: bool = False) -> RequestError:
        if is_slow:
            return RequestError(
                f"guided_decoding_guide takes more than {self._step_timeout_s:g} s of "
                "processor time to find the ids that may come next. Make the guide less "
                "ambiguous: fewer ways to derive the same text, fewer alternatives, or lower "
                "counts ({m,n}, maxLength, maxItems); or serve with a larger "
                "--guide-step-timeout."
            )
        return RequestError(
            "the process of guided_decoding_guide ended: the guide takes too much memory, or "
            "another request with the same guide ended it. Make the guide smaller, or send the "
            "request again.",
            ErrorKind.UNAVAILABLE,
        )

    # ---- end -----------------------------------------------------------------------------

    @property
    def is_well(self) -> bool:
        """Whether the process is alive and owes no answer, so that another guide may use the
        process.
        """
        self.receive()
        # An idle process sends nothing: a readable connection means that the process has ended.
        return not (self.has_ended or self._asked or self._connection.poll())

    def fileno(self) -> int:
        """The descriptor that becomes readable with an answer, or with the process's end."""
        return self._connection.fileno()

    @property
    def is_asked(self) -> bool:
        """Whether an answer is to come."""
        return bool(self._asked)

    def close(self) -> None:
        """End the process."""
        self.has_ended = True
        self._connection.close()


def receive_masks(processes: Iterable[MaskProcess], seconds: float = 0.0) -> None:
    """Take in the answers of these processes; wait for a first one at most so long."""
    asked = {process.fileno(): process for process in processes if process.is_asked}
    if not asked:
        return
    poll = select.poll()
    for descriptor in asked:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(1e3 * seconds):
        asked[descriptor].receive()
