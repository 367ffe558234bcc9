"""What a command prints: a full disk or a reader that went away ends it without a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from trimaran.comm.errors import TrimaranError


class OutputError(TrimaranError):
    """What a command prints cannot be written."""


class ReaderGoneError(OutputError):
    """Nobody reads any more what a command prints (`trimaran ... | head`)."""


class _Watched:
    """A stream that remembers its first failure, by which it is told from other files'."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._remembering():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._remembering():
            self._stream.flush()

    @contextlib.contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


@contextlib.contextmanager
def watched_output() -> Iterator[None]:
    """Run a command; all that it printed is written when this ends.

    A failure that the command has dealt with itself is no failure here.

    Raises:
        OutputError: standard output cannot be written, on a full disk for one.
        ReaderGoneError: it is a pipe whose reader is gone.
    """
    stream = sys.stdout
    watched = _Watched(stream)
    sys.stdout = cast("TextIO", watched)
    try:
        try:
            yield
        except SystemExit:
            if watched.error is not None:  # argparse goes on where its help is not written
                raise watched.error from None
            watched.flush()
            raise
        if watched.error is None:
            watched.flush()
    except OSError as error:
        if error is not watched.error:
            raise
        kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputError
        raise kind(f"standard output cannot be written: {error.strerror}") from None
    finally:
        sys.stdout = stream
        _drop_the_rest(stream)


def _drop_the_rest(stream: TextIO) -> None:
    """Write what is left, or see to it that the interpreter does not fail on it at its end."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
