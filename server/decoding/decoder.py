"""Decodes long bodies and messages in helper processes, so that no stream waits for them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing import reduction
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.decoding.body import LONG_BYTES, LongBody
from trimaran.server.decoding.exchange import ParsedHead, receive_parsed
from trimaran.server.decoding.process import Kept, Refusal
from trimaran.server.decoding.tasks import (
    GenerateTask,
    InferTask,
    LoadJsonTask,
    LoadMessageTask,
    MessageTask,
    OtherTask,
    Task,
)
from trimaran.server.inference.helper_process import HelperProcess
from trimaran.server.inference.request import Model
from trimaran.server.inference.tensor_bytes import Buffer
from trimaran.server.inference.text_limits import PromptBound, prompt_bound
from trimaran.server.protocol.infer_json import ParsedInfer
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.protocol.message_scan import check_head

logger = logging.getLogger(__name__)

_BYTES_PER_S = 10e6
"""What a waiting byte counts: work of so many bytes more begins a second later."""


_Waiting = list[tuple[float, int, asyncio.Future[None]]]


class SizeOrderedSlots:
    """A number of slots that short work gets before long work.

    Work is ordered by its arrival plus a time in proportion to its size: short work overtakes
    long work, and long work is overtaken for a bounded time only. Work of more than
    ``long_bytes`` has one of the slots at most, for the memory.
    """

    def __init__(self, num_slots: int, long_bytes: int = LONG_BYTES) -> None:
        self._num_free = num_slots
        self._long_bytes = long_bytes
        self._has_long = False
        self._order = itertools.count()
        self._short: _Waiting = []
        self._long: _Waiting = []

    @asynccontextmanager
    async def slot(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold a slot for work of so many bytes; the wait for the slot may be cancelled."""
        is_long = num_bytes > self._long_bytes
        await self._acquire(num_bytes, is_long=is_long)
        try:
            yield
        finally:
            self._release(is_long=is_long)

    async def _acquire(self, num_bytes: int, *, is_long: bool) -> None:
        loop = asyncio.get_running_loop()
        granted: asyncio.Future[None] = loop.create_future()
        due = loop.time() + num_bytes / _BYTES_PER_S
        queue = self._long if is_long else self._short
        heapq.heappush(queue, (due, next(self._order), granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(is_long=is_long)
            raise

    def _release(self, *, is_long: bool) -> None:
        self._num_free += 1
        if is_long:
            self._has_long = False
        self._grant()

    def _grant(self) -> None:
        """Give free slots to the work that is due first."""
        while self._num_free > 0:
            for queue in (self._short, self._long):
                while queue and queue[0][2].done():
                    heapq.heappop(queue)
            queues = [self._short] if self._has_long else [self._short, self._long]
            queues = [queue for queue in queues if queue]
            if not queues:
                return
            queue = min(queues, key=lambda each: each[0][:2])
            self._num_free -= 1
            self._has_long |= queue is self._long
            heapq.heappop(queue)[2].set_result(None)


_NUM_PROCESSES = 2
_MAX_KEPT_BYTES = 16 << 20
"""A process that keeps more memory than this after a body is ended: the interpreter does not
give back blocks of which a part is in use."""

_MODULE = "trimaran.server.decoding.process"

_TakeBlob = Callable[[int], Buffer]


class Decoder:
    """Processes that each decode one long body at a time, started when there is one.

    The JSON module and protobuf hold the interpreter while they parse, and what they made takes
    as long again to convert and to free: a thread would not do.
    """

    def __init__(self, max_json_bytes: int, max_message_bytes: int) -> None:
        """``max_json_bytes`` and ``max_message_bytes`` limit bodies and gRPC messages."""
        self._max_json_bytes = max_json_bytes
        self._max_message_bytes = max_message_bytes
        self._slots = SizeOrderedSlots(_NUM_PROCESSES)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def read_infer(
        self, body: LongBody, json_bytes: int, ready: Callable[[], Model]
    ) -> tuple[Model, ParsedInfer]:
        """The request of an ``infer`` body whose first bytes are JSON, for ``ready()``.

        Raises:
            RequestError: as for `parse_infer`, or the request does not fit the model.
        """
        num_blob_bytes = len(body) - json_bytes

        def task(config: bytes, prompts: PromptBound | None) -> InferTask:
            return InferTask(config, self._max_json_bytes, num_blob_bytes, prompts)

        return await self._read_for(task, body, json_bytes, ready)

    async def read_generate(
        self, body: LongBody, ready: Callable[[], Model]
    ) -> tuple[Model, ParsedInfer]:
        """The request of a ``generate`` body.

        Raises:
            RequestError: as for `GenerateMapper.parse`, or it does not fit the model.
        """

        def task(config: bytes, prompts: PromptBound | None) -> GenerateTask:
            return GenerateTask(config, self._max_json_bytes, prompts)

        return await self._read_for(task, body, len(body), ready)

    async def read_message(
        self, head_parts: Sequence[Buffer], raw_contents: Sequence[Buffer]
    ) -> ParsedInfer:
        """The request of a gRPC message in the two parts of `split_infer`.

        Raises:
            RequestError: as for `parse_message` and `check_head`, or it cannot be decoded.
        """
        num_head_bytes = sum(map(len, head_parts))
        check_head(num_head_bytes, self._max_message_bytes)
        task = MessageTask(self._max_message_bytes, [len(raw) for raw in raw_contents])
        contents = iter(raw_contents)
        body = LongBody(head_parts)
        found = await self._carry_out(task, body, num_head_bytes, lambda _: next(contents))
        assert isinstance(found, ParsedInfer)
        return found

    async def read_load(self, name: str, body: LongBody) -> LoadRequest:
        """The request of a body that asks to load the model ``name``.

        Raises:
            RequestError: as for `load_request_of_json`.
        """
        return await self._read_load(LoadJsonTask(name, self._max_json_bytes), body)

    async def read_load_message(self, message: bytes) -> LoadRequest:
        """The request of a serialized ``RepositoryModelLoadRequest``.

        Raises:
            RequestError: as for `load_request_of_grpc`, or the message cannot be decoded.
        """
        return await self._read_load(LoadMessageTask(), LongBody((message,)))

    async def read_other(self, task: OtherTask, body: LongBody, timeout_s: float) -> Any:
        """What a task of another room finds in a body.

        Raises:
            RequestError: the work takes longer than ``timeout_s``, or the process ended.
        """
        return await self._carry_out(task, body, len(body), _no_blob, timeout_s)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.kill()
        for process in self._idle:
            process.reap()
        self._all.clear()
        self._idle.clear()

    async def _read_load(self, task: Task, body: LongBody) -> LoadRequest:
        found = await self._carry_out(task, body, len(body), _no_blob)
        assert isinstance(found, LoadRequest)
        return found

    async def _read_for(
        self,
        task: Callable[[bytes, PromptBound | None], Task],
        body: LongBody,
        json_bytes: int,
        ready: Callable[[], Model],
    ) -> tuple[Model, ParsedInfer]:
        while True:
            model = ready()
            take_blob = _in_order(body, json_bytes)
            work = task(model.config.SerializeToString(), prompt_bound(model))
            found = await self._carry_out(work, body, json_bytes, take_blob)
            assert isinstance(found, ParsedInfer)
            # Meanwhile the model may have been replaced.
            if ready().config == model.config:
                return ready(), found

    async def _carry_out(
        self,
        task: Task | OtherTask,
        body: LongBody,
        num_bytes: int,
        take_blob: _TakeBlob,
        timeout_s: float | None = None,
    ) -> Any:
        async with self._slots.slot(num_bytes):
            process = self._idle.pop() if self._idle else self._start()
            try:
                answer = await asyncio.wait_for(
                    asyncio.to_thread(process.exchange, task, body, num_bytes, take_blob),
                    timeout_s,
                )
            # Before its base class OSError.
            except asyncio.TimeoutError:
                self._end(process)
                asyncio.get_running_loop().run_in_executor(None, process.reap)
                raise RequestError(
                    f"reading {task.subject} took more than {timeout_s:g} s. Send a "
                    "shorter one."
                ) from None
            except (EOFError, OSError):
                self._end(process)
                logger.error("the process that read a body of %d bytes ended", num_bytes)
                raise RequestError(
                    f"the process that read {task.subject} ended", ErrorKind.UNAVAILABLE
                ) from None
            except BaseException:
                # The waiter for the answer is gone, and maybe the exchange: it has ended, or
                # never began.
                self._end(process)
                asyncio.get_running_loop().run_in_executor(None, process.reap)
                raise
            if process.has_grown:
                self._end(process)
                asyncio.get_running_loop().run_in_executor(None, process.reap)
            else:
                self._idle.append(process)
        if not isinstance(answer, Refusal):
            return answer
        if answer.kind is None:
            raise RuntimeError(answer.text)
        raise RequestError(answer.text, answer.kind)

    def _start(self) -> _Process:
        process = _Process()
        self._all.add(process)
        return process

    def _end(self, process: _Process) -> None:
        process.kill()
        self._all.discard(process)


def _in_order(body: LongBody, start: int) -> _TakeBlob:
    """Takes the blobs of a body, which follow each other from ``start`` on."""
    view = body.view() if start < len(body) else memoryview(b"")
    end = start

    def take(num_bytes: int) -> memoryview:
        nonlocal end
        end += num_bytes
        return view[end - num_bytes : end]

    return take


def _no_blob(num_bytes: int) -> Buffer:
    raise AssertionError("a request to load a model has no blobs")


class _Process(HelperProcess):
    """A process that decodes."""

    def __init__(self) -> None:
        super().__init__(_MODULE)
        self.has_grown = False
        """Whether the process kept too much memory after the last exchange."""

    def exchange(
        self, task: Task | OtherTask, body: LongBody, num_bytes: int, take_blob: _TakeBlob
    ) -> Any:
        """Send the first bytes of a body and wait for the answer. Called in a thread.

        Raises:
            EOFError, OSError: the process has ended.
        """
        try:
            self.connection.send((task, num_bytes))
            reduction.send_handle(self.connection, body.fileno(), self.pid)
            head = self.connection.recv()
            if isinstance(head, ParsedHead):
                head = receive_parsed(self.connection, head, take_blob)
            if num_bytes > LONG_BYTES:
                kept = self.connection.recv()
                assert isinstance(kept, Kept)
                self.has_grown = kept.num_bytes > _MAX_KEPT_BYTES
            return head
        except (EOFError, OSError):
            self.reap()
            raise
