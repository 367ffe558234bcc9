"""A limit on the logits that no client has read yet: those of streams, and of whole answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from trimaran.comm.errors import ErrorKind, RequestError

logger = logging.getLogger(__name__)

_MIN_BYTES = 16 << 20
_MIN_TOKENS = 512
_LOGITS = ("context_logits", "generation_logits")


class Stream(Protocol):
    """A request whose tokens are read while more of them come."""

    def cut_off(self, error: RequestError) -> None:
        """End the request, and drop what is unread."""


class UnreadLogits:
    """What all streams of a front end hold together, in bytes, and beside them what all answers
    hold that come as a whole.

    Ids and texts are small, and so the engine never waits for a client. Logits have the size of
    the vocabulary for each token. Beyond the limit, the stream that holds most is ended: the
    streams of clients that read go on. Among whole answers the last answer to begin is ended,
    so that the other answers complete. A single answer has a limit of its own
    (`transaction.check_logits`) and may hold more than this limit.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        """``max_bytes`` is what the operator set; 0: by the engines' vocabularies."""
        self._is_set = max_bytes > 0
        self._max_bytes = max_bytes or _MIN_BYTES
        self._sizes: dict[Stream, int] = {}
        self._wholes: dict[object, dict[Stream, int]] = {}
        """By whole answer, the first to begin first: what each of its sequences holds."""
        self.num_bytes = 0
        self.num_whole_bytes = 0

    def fit(self, token_bytes: int) -> None:
        """Have room for the logits of an engine, which take so many bytes a token."""
        if not self._is_set:
            self._max_bytes = max(self._max_bytes, _MIN_TOKENS * token_bytes)

    def hold(self, stream: Stream, num_bytes: int) -> None:
        """A stream now holds so many bytes."""
        self.num_bytes += num_bytes - self._sizes.pop(stream, 0)
        if num_bytes:
            self._sizes[stream] = num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            most = self._sizes[largest]
            logger.warning(
                "A stream is ended: its client leaves %d bytes of logits unread", most
            )
            error = (
                f"the client has not read {most} bytes of this stream's logits, and all "
                f"streams together may hold {self._max_bytes}. Read faster, ask for fewer "
                "tokens, or start the server with a larger --max-unread-logits-bytes."
            )
            self.num_bytes -= self._sizes.pop(largest)
            largest.cut_off(RequestError(error, ErrorKind.UNAVAILABLE))

    def hold_whole(self, answer: object, sequence: Stream, num_bytes: int) -> None:
        """A sequence of an answer that comes as a whole holds so many bytes more."""
        self.num_whole_bytes += num_bytes
        held = self._wholes.setdefault(answer, {})
        held[sequence] = held.get(sequence, 0) + num_bytes
        while self.num_whole_bytes > self._max_bytes and len(self._wholes) > 1:
            last = next(reversed(self._wholes))
            sequences = self._wholes[last]
            most = sum(sequences.values())
            logger.warning(
                "An answer with %d bytes of logits is ended: others came first", most
            )
            error = (
                f"the answers that are being made hold {self.num_whole_bytes} bytes of logits, "
                f"and several together may hold {self._max_bytes}. Send the request again "
                "later, stream it, or start the server with a larger "
                "--max-unread-logits-bytes."
            )
            del self._wholes[last]
            self.num_whole_bytes -= most
            for each in sequences:
                each.cut_off(RequestError(error, ErrorKind.UNAVAILABLE))

    def release(self, answer: object, sequence: Stream) -> None:
        """A sequence holds nothing any more."""
        self.num_bytes -= self._sizes.pop(sequence, 0)
        held = self._wholes.get(answer)
        if held is not None and sequence in held:
            self.num_whole_bytes -= held.pop(sequence)
            if not held:
                del self._wholes[answer]


class GatheredLogits:
    """The logits of one answer that come in parts and are kept until the answer is whole. They
    count among those of whole answers."""

    def __init__(self, unread: UnreadLogits, drop: Callable[[], None]) -> None:
        """``drop`` forgets what is kept."""
        self._unread = unread
        self._drop = drop
        self._error: RequestError | None = None

    def hold(self, extras: dict[str, Any]) -> None:
        """Keep the logits of one more part.

        Raises:
            RequestError: the answer is ended, because several hold too much.
        """
        if num_bytes := logits_bytes(extras):
            self._unread.hold_whole(self, self, num_bytes)
        if self._error is not None:
            raise self._error

    def cut_off(self, error: RequestError) -> None:
        """End the answer at its next part, and drop what is kept now."""
        self._error = error
        self._drop()

    def release(self) -> None:
        """Nothing is kept any more."""
        self._unread.release(self, self)
        # The keeper refers to this object too: a request and its tensors would stay until the
        # collector comes.
        self._drop = _nothing


def _nothing() -> None:
    """Nothing is left to drop."""


def logits_bytes(extras: dict[str, Any], names: tuple[str, ...] = _LOGITS) -> int:
    """The size of the logits of a chunk, or of those of the names."""
    return sum(len(row) for name in names for row in extras.get(name, ()))
