"""The process of one instance of a Python model, which runs its ``model.py``."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from trimaran.server.python_models import utils
from trimaran.server.python_models.inference_request import ReceivedRequest
from trimaran.server.python_models.link import Link, current_scope, set_link
from trimaran.server.python_models.responses import InferenceResponse, Ticket
from trimaran.server.python_models.tensors import TritonModelException
from trimaran.server.python_models.wire import (
    NULL_KEY,
    Execute,
    Executed,
    Failed,
    Log,
    Ready,
    RequestFields,
    Start,
)

if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder

_PR_SET_PDEATHSIG = 1
_MODULE = "triton_python_backend_utils"


def main() -> None:
    """Serve the front end at the other end of the socket whose descriptor is argument 1."""
    # The supervisor drains first; a signal to the whole group must not end requests.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Set by the kernel, so that it works while user code holds the interpreter.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=int(sys.argv[1]))
    # A process that the model forks must not keep the connection open.
    os.register_at_fork(after_in_child=sock.close)
    link = Link(sock)
    start, *early = link.receive_first()
    assert isinstance(start, Start)
    link.start(early)
    set_link(link)
    try:
        model = load(start)
        if hasattr(model, "initialize"):
            model.initialize(dict(start.args))
    except BaseException as error:
        link.send(Failed(text=_described(error)))
        _end(1)
    runner = Runner(link, start, model)
    link.send(Ready(capacity=runner.capacity))
    while (batch := link.inbox.get()) is not None:
        runner.run(batch)
    _end(_finalized(link, model))


class CompiledAtLoad(SourceFileLoader):
    """Compiles a model's source at each load.

    Python's cached byte code is found by the second and the size of the source. A model that
    was changed within one second, to the same size, would otherwise run its old code.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The code of the file as the file is now."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def find_modules_of(model: Path) -> None:
    """Have the modules below a model's folder compiled at each load."""
    find = FileFinder.path_hook(
        (ExtensionFileLoader, EXTENSION_SUFFIXES), (CompiledAtLoad, SOURCE_SUFFIXES)
    )

    def find_below(path: str) -> PathEntryFinder:
        if not Path(path).is_relative_to(model):
            raise ImportError(f"{path} is not below {model}")
        return find(path)

    sys.path_hooks.insert(0, find_below)


def load(start: Start) -> Any:
    """The model of a ``model.py``.

    The version's folder and the model's folder are appended to the search path. The file is the
    module ``model`` of a package that is named like the version, for relative imports.

    Raises:
        TritonModelException: no class ``TritonPythonModel``, or a class without ``execute``.
        Exception: any error of the user code.
    """
    path = Path(start.file)
    find_modules_of(path.parent.parent)
    sys.path += [str(path.parent), str(path.parent.parent)]
    sys.modules[_MODULE] = utils
    package = ModuleType(start.version)
    package.__path__ = [str(path.parent)]
    sys.modules[start.version] = package
    name = f"{start.version}.model"
    spec = importlib.util.spec_from_file_location(
        name, path, loader=CompiledAtLoad(name, str(path))
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = getattr(module, "TritonPythonModel", None)
    if made is None or not callable(getattr(made, "execute", None)):
        raise TritonModelException(
            f"{path} has no class TritonPythonModel with a method execute(self, requests)"
        )
    return made()


class Runner:
    """Executes batches: concurrently for a coroutine, else in a fixed number of threads."""

    def __init__(self, link: Link, start: Start, model: Any) -> None:
        self._link = link
        self._start = start
        self._model = model
        self._is_async = inspect.iscoroutinefunction(model.execute)
        self.capacity = 0 if self._is_async else start.num_threads
        if self.capacity > 1:
            self._pool = ThreadPoolExecutor(start.num_threads, "execute")
        if self._is_async:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="execute", daemon=True).start()

    def run(self, batch: Execute) -> None:
        """Execute a batch; returns when the next batch may come."""
        requests = [self._received(RequestFields.from_wire(wire)) for wire in batch.requests]
        # A null request has no client: the calls of a batch must not wait for one.
        tickets = [request.ticket for request in requests]
        scope = self._link.open_scope(each for each in tickets if each.key != NULL_KEY)
        token = current_scope.set(scope)
        try:
            if self._is_async:
                # The task inherits this thread's context, and with it the scope.
                work = self._run_async(batch, requests)
                asyncio.run_coroutine_threadsafe(work, self._loop)
            elif self.capacity > 1:
                self._pool.submit(copy_context().run, self._run_sync, batch, requests)
            else:
                self._run_sync(batch, requests)
        finally:
            current_scope.reset(token)

    def _run_sync(self, batch: Execute, requests: list[ReceivedRequest]) -> None:
        try:
            self._answer(requests, self._model.execute(requests))
        except BaseException as error:
            self._fail(requests, error)
        finally:
            self._executed(batch, requests)

    async def _run_async(self, batch: Execute, requests: list[ReceivedRequest]) -> None:
        try:
            self._answer(requests, await self._model.execute(requests))
        except BaseException as error:
            self._fail(requests, error)
        finally:
            self._executed(batch, requests)

    def _executed(self, batch: Execute, requests: Sequence[ReceivedRequest]) -> None:
        again = [request for request in requests if request.is_rescheduled]
        for request in again:
            request.ticket.is_closed = True
            self._link.forget(request.ticket.key)
        keys = [request.ticket.key for request in again if request.ticket.key != NULL_KEY]
        self._link.send(Executed(batch=batch.batch, rescheduled=keys))

    def _received(self, fields: RequestFields) -> ReceivedRequest:
        all_outputs = self._start.outputs
        wanted = fields.outputs or list(all_outputs)
        outputs = {name: all_outputs[name] for name in wanted} | self._start.states
        is_decoupled = self._start.is_decoupled
        ticket = Ticket(fields.key, outputs, self._link.respond, is_decoupled=is_decoupled)
        is_iterative = self._start.is_iterative
        return ReceivedRequest(fields, wanted, ticket, is_iterative=is_iterative)

    def _answer(self, requests: Sequence[ReceivedRequest], responses: Any) -> None:
        """Send the responses that ``execute`` returned.

        Raises:
            TritonModelException: the return value is malformed.
        """
        if responses is None:
            return
        if self._start.is_decoupled:
            raise TritonModelException(
                "a decoupled model's execute returned responses, but has to send them with "
                "InferenceResponseSender.send() and return None"
            )
        if len(responses) != len(requests):
            raise TritonModelException(
                f"Number of InferenceResponse objects do not match the number of "
                f"InferenceRequest objects. InferenceRequest(s) size is:{len(requests)}, and "
                f"InferenceResponse(s) size is:{len(responses)}"
            )
        for request, response in zip(requests, responses, strict=True):
            if response is None and (request.ticket.is_closed or request.is_rescheduled):
                continue
            if not isinstance(response, InferenceResponse):
                raise TritonModelException(
                    "Expected an 'InferenceResponse' object in the execute function return "
                    f"list, found type '{type(response).__name__}'."
                )
            request.ticket.send(response, is_final=True)

    def _fail(self, requests: Sequence[ReceivedRequest], error: BaseException) -> None:
        text = _words_of(error)
        _log(self._link, f"execute of model '{self._start.name}' failed", error)
        for request in requests:
            request.ticket.fail(
                f"Failed to process the request(s) for model '{self._start.name}', message: "
                f"{text}"
            )


def _finalized(link: Link, model: Any) -> int:
    """Finalize the model; the exit code."""
    if hasattr(model, "finalize"):
        try:
            model.finalize()
        except BaseException as error:
            _log(link, "finalize failed", error)
            return 1
    return 0


def _log(link: Link, what: str, error: BaseException) -> None:
    link.send(Log(level=logging.ERROR, text=f"{what}\n{_described(error)}"))


def _described(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    return _sendable("".join(lines).rstrip())


def _words_of(error: BaseException) -> str:
    try:
        text = str(error)
    # The class of the model is user code too.
    except Exception:
        text = "<exception str() failed>"
    return _sendable(f"{type(error).__name__}: {text}")


def _sendable(text: str) -> str:
    """A text whose unpaired surrogates, which no message can hold, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _end(code: int) -> None:
    """End at once: threads of the model's libraries must not delay the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
