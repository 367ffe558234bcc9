"""Processes that encode and decode what is too long for the event loop, shortest first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.tokenizers.prepared import PreparedTokenizer
from trimaran.server.inference.helper_process import HelperProcess
from trimaran.server.models.encoded_texts import EncodedTexts, joined
from trimaran.server.models.tokenizer_process import (
    LastUsed,
    TokenizerFault,
    TokenizerTask,
)

logger = logging.getLogger(__name__)

_MODULE = "trimaran.server.models.tokenizer_process"
_PIECE_BYTES = 64 << 10
"""Short texts of a request travel together up to this size. A longer text is a piece."""

_PIECE_TEXTS = 1 << 12
_LONG_BYTES = 128 << 10
"""Longer pieces take half a second or more; one process is kept free of them."""

_BYTES_PER_S = 100_000
"""A piece is overtaken by pieces that arrive later as long as these are shorter, a second for
each 100 KB that its request has brought."""

_ID_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerSource:
    """A tokenizer as processes read it."""

    prepared: PreparedTokenizer

    number: int = field(default_factory=itertools.count().__next__)


@dataclass(slots=True, order=True)
class _Piece:
    """A part of a request that a process takes at once."""

    due: float
    number: int
    source: TokenizerSource = field(compare=False)
    task: TokenizerTask = field(compare=False)
    answer: asyncio.Future[Any] = field(compare=False)

    @property
    def is_long(self) -> bool:
        return self.task.num_bytes > _LONG_BYTES


class TokenizerPool:
    """A fixed number of processes for all tokenizers, each started when it is first needed.

    A request is cut into pieces, and free processes take the piece that is due first: its
    request's arrival, and a time in proportion to the bytes that the request has brought. Long
    pieces leave one process to the others. A request that is cancelled leaves the queue; a
    piece that a process has begun is finished. Used on one event loop.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._max_long = max(1, num_processes - 1)
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="tokenizer-pool")
        self._short: list[_Piece] = []
        self._long: list[_Piece] = []
        self._numbers = itertools.count()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._num_busy = self._num_busy_long = 0
        self._tasks: set[asyncio.Task[None]] = set()
        weakref.finalize(self, _end_all, self._all)

    @property
    def num_waiting(self) -> int:
        """Pieces that no process has begun, of requests that are not cancelled."""
        return sum(not p.answer.done() for p in (*self._short, *self._long))

    async def encode(
        self, source: TokenizerSource, texts: list[str], add_special_tokens: bool
    ) -> EncodedTexts:
        """The ids of each text.

        Raises:
            RequestError: a process ended under the request, which may be sent again.
        """
        tasks = [
            TokenizerTask(source.number, part, None, add_special_tokens, num_bytes)
            for part, num_bytes in _parts(texts)
        ]
        return joined(await self._carry_out(source, tasks))

    async def decode(
        self, source: TokenizerSource, ids: EncodedTexts, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each list of ids.

        Raises:
            RequestError: as for `encode`.
        """
        tasks = []
        for index in range(len(ids)):
            part = ids.part(index, index + 1)
            num_bytes = len(part.ids) * _ID_BYTES
            tasks.append(TokenizerTask(source.number, [], part, skip_special_tokens, num_bytes))
        answers: list[list[str]] = await self._carry_out(source, tasks)
        return list(itertools.chain.from_iterable(answers))

    async def _carry_out(
        self, source: TokenizerSource, tasks: list[TokenizerTask]
    ) -> list[Any]:
        loop = asyncio.get_running_loop()
        due = loop.time()
        answers: list[asyncio.Future[Any]] = []
        for task in tasks:
            due += task.num_bytes / _BYTES_PER_S
            piece = _Piece(due, next(self._numbers), source, task, loop.create_future())
            heapq.heappush(self._long if piece.is_long else self._short, piece)
            answers.append(piece.answer)
        self._dispatch()
        try:
            return await asyncio.gather(*answers)
        finally:
            # The other pieces of a request that was cancelled or has failed are not begun.
            for answer in answers:
                answer.cancel()

    # ---- processes ----------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give pieces to processes that are free."""
        while self._num_busy < self._num_processes:
            piece = self._next_piece()
            if piece is None:
                return
            self._num_busy += 1
            self._num_busy_long += piece.is_long
            task = asyncio.ensure_future(self._serve(piece))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_piece(self) -> _Piece | None:
        for queue in (self._short, self._long):
            while queue and queue[0].answer.done():
                heapq.heappop(queue)
        allowed = [self._short] if self._short else []
        if self._long and self._num_busy_long < self._max_long:
            allowed.append(self._long)
        if not allowed:
            return None
        return heapq.heappop(min(allowed, key=lambda queue: queue[0]))

    async def _serve(self, piece: _Piece) -> None:
        """Have a process do a piece, and settle its answer."""
        loop = asyncio.get_running_loop()
        process = self._idle.pop() if self._idle else self._start()
        try:
            answer = await loop.run_in_executor(
                self._threads, process.exchange, piece.task, piece.source
            )
        except (EOFError, OSError):
            self._end(process)
            logger.error("a tokenizer process ended under %d bytes", piece.task.num_bytes)
            _fail(piece, RequestError(
                "the process that tokenized the request ended; send the request again",
                ErrorKind.UNAVAILABLE,
            ))  # fmt: skip
        except BaseException as error:
            # The event loop ends, and maybe the exchange goes on.
            self._end(process)
            _fail(piece, error)
            raise
        else:
            self._idle.append(process)
            if isinstance(answer, TokenizerFault):
                _fail(piece, RuntimeError(answer.text))
            elif not piece.answer.done():
                piece.answer.set_result(answer)
        finally:
            self._num_busy -= 1
            self._num_busy_long -= piece.is_long
        self._dispatch()

    def _start(self) -> _Process:
        process = _Process()
        self._all.add(process)
        return process

    def _end(self, process: _Process) -> None:
        self._all.discard(process)
        process.end()


def _end_all(processes: set[_Process]) -> None:
    for process in processes:
        process.end()


def _fail(piece: _Piece, error: BaseException) -> None:
    if not piece.answer.done():
        if isinstance(error, asyncio.CancelledError):
            piece.answer.cancel()
        else:
            piece.answer.set_exception(error)


def _parts(texts: list[str]) -> Iterator[tuple[list[str], int]]:
    """Texts that travel together, in order, and their size."""
    part: list[str] = []
    num_bytes = 0
    for text in texts:
        is_full = num_bytes + len(text) > _PIECE_BYTES or len(part) == _PIECE_TEXTS
        if part and is_full:
            yield part, num_bytes
            part, num_bytes = [], 0
        part.append(text)
        num_bytes += len(text)
    if part:
        yield part, num_bytes


class _Process(HelperProcess):
    """A process that tokenizes."""

    def __init__(self) -> None:
        super().__init__(_MODULE)
        self._known: LastUsed[None] = LastUsed()

    def exchange(self, task: TokenizerTask, source: TokenizerSource) -> Any:
        """Send a task and wait for its answer. Called in a thread.

        Raises:
            EOFError, OSError: the process has ended.
        """
        self.connection.send(task)
        self._known.use(source.number, lambda: self.connection.send(source.prepared))
        return self.connection.recv()

    def end(self) -> None:
        """Kill the process, if it still runs. An exchange under way keeps the connection open
        until it fails."""
        self.kill()
        self.reap()
