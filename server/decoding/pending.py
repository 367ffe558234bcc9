"""Memory for request bodies and gRPC messages that have come and are not yet decoded."""

from __future__ import annotations

from trimaran.comm.errors import ErrorKind, RequestError

_SHORT_BYTES = 64 << 10
"""The beginning of a body, which always has room: honest requests are short."""


class PendingBodies:
    """A limit on the bytes of all long bodies of a protocol together.

    A body that would pass the limit is refused, not delayed: many slow senders of long bodies
    would otherwise hold each other up for ever.
    """

    def __init__(self, max_bytes: int, flag: str) -> None:
        """``flag`` sets the limit, for errors."""
        self._max_bytes = max_bytes
        self._flag = flag
        self._num_bytes = 0

    def body(self) -> BodyMemory:
        """The memory of one request's body."""
        return BodyMemory(self)

    def take(self, num_bytes: int) -> None:
        """Count so many bytes more.

        Raises:
            RequestError: there is no room for them.
        """
        if self._num_bytes + num_bytes > self._max_bytes:
            raise RequestError(
                f"requests of {self._num_bytes} bytes wait to be decoded, and at most "
                f"{self._max_bytes} may. Send the request again later, or use {self._flag} to "
                "increase the limit.",
                ErrorKind.UNAVAILABLE,
            )
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count so many bytes less."""
        self._num_bytes -= num_bytes


class BodyMemory:
    """What one body takes of `PendingBodies`: until the context's end, `release`, or the end of
    this object."""

    def __init__(self, bodies: PendingBodies) -> None:
        self._bodies = bodies
        self._num_bytes = 0
        self._num_taken = 0

    def add(self, num_bytes: int) -> None:
        """Take room for so many bytes more.

        Raises:
            RequestError: there is none.
        """
        self._num_bytes += num_bytes
        missing = self._num_bytes - _SHORT_BYTES - self._num_taken
        if missing > 0:
            self._bodies.take(missing)
            self._num_taken += missing

    def __enter__(self) -> BodyMemory:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give everything back; the body is decoded."""
        self._bodies.give_back(self._num_taken)
        self._num_bytes = self._num_taken = 0
