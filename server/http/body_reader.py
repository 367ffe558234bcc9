"""Reads long JSON bodies in other processes, so that streams do not wait."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.http.body_process import BodyTask, Refusal, receive_parsed
from trimaran.server.inference.request import Model
from trimaran.server.protocol.infer_json import ParsedInfer

logger = logging.getLogger(__name__)

LONG_BYTES = 256 << 10
"""Up to this size a body is parsed here, within some 30 ms: sending it takes longer."""

_NUM_PROCESSES = 2
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from trimaran.server.http.body_process import main; main()"
)


class BodyReader:
    """Processes that read one long body at a time, started on demand.

    A thread would not do: the JSON module holds the interpreter while it parses, and converting
    and freeing the result takes as long again.
    """

    def __init__(self, max_input_bytes: int) -> None:
        self._max_input_bytes = max_input_bytes
        self._free = asyncio.Semaphore(_NUM_PROCESSES)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def read_infer(
        self, body: bytes, json_bytes: int, ready: Callable[[], Model]
    ) -> tuple[Model, ParsedInfer]:
        """The request of an ``infer`` body whose first bytes are JSON, for ``ready()``.

        Raises:
            RequestError: as for `parse_infer`, or the request does not fit the model.
        """
        view = memoryview(body)
        json, blobs = view[:json_bytes], view[json_bytes:]
        return await self._read(json, blobs, ready, is_generate=False)

    async def read_generate(
        self, body: bytes, ready: Callable[[], Model]
    ) -> tuple[Model, ParsedInfer]:
        """The request of a ``generate`` body.

        Raises:
            RequestError: as for `GenerateMapper.parse`, or it does not fit the model.
        """
        return await self._read(memoryview(body), memoryview(b""), ready, is_generate=True)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.kill()
        for process in self._idle:
            process.wait()
        self._all.clear()
        self._idle.clear()

    async def _read(
        self,
        json: memoryview,
        blobs: memoryview,
        ready: Callable[[], Model],
        *,
        is_generate: bool,
    ) -> tuple[Model, ParsedInfer]:
        while True:
            model = ready()
            config = model.config.SerializeToString()
            task = BodyTask(config, self._max_input_bytes, is_generate, len(blobs))
            parsed = await self._carry_out(task, json, blobs)
            # The model may have been replaced meanwhile.
            if ready().config == model.config:
                return ready(), parsed

    async def _carry_out(
        self, task: BodyTask, json: memoryview, blobs: memoryview
    ) -> ParsedInfer:
        async with self._free:
            process = self._idle.pop() if self._idle else self._start()
            try:
                answer = await asyncio.to_thread(process.exchange, task, json, blobs)
            except (EOFError, OSError):
                self._end(process)
                logger.error("the process that read a body of %d bytes ended", len(json))
                raise RequestError(
                    "the process that read the request's JSON ended", ErrorKind.UNAVAILABLE
                ) from None
            except BaseException:
                # The request that waited was cancelled, and perhaps its exchange ended or never
                # began.
                self._end(process)
                asyncio.get_running_loop().run_in_executor(None, process.reap)
                raise
            self._idle.append(process)
        if isinstance(answer, ParsedInfer):
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


class _Process:
    """One process and its connection."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._connection = Connection(ours.detach())

    def exchange(
        self, task: BodyTask, json: memoryview, blobs: memoryview
    ) -> ParsedInfer | Refusal:
        """Send a body and wait for the parsed request. Called in a thread.

        Raises:
            EOFError, OSError: the process has ended.
        """
        try:
            self._connection.send(task)
            self._connection.send_bytes(json)
            head = self._connection.recv()
            if isinstance(head, Refusal):
                return head
            return receive_parsed(self._connection, head, blobs)
        except (EOFError, OSError):
            self.wait()
            raise

    def kill(self) -> None:
        """Kill the process, and with it an exchange under way, which waits for the end."""
        self._process.kill()

    def reap(self) -> None:
        """Return once the process has ended; freeing much memory takes a while."""
        self._process.wait()

    def wait(self) -> None:
        """Return once the process has ended and its thread has returned."""
        self.reap()
        self._connection.close()
