"""Concurrent clients that compare every token and account for every request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import numpy as np
import tritonclient.grpc.aio as grpc_client
from models import Case
from served import Served

RIGHT, RETRYABLE, CANCELLED = "right", "retryable", "cancelled"
LOST = "connection lost"
WRONG, LATE, FAILED = "wrong", "late", "failed"
_RETRY_PAUSE_S = 1.0
# A channel goes on refusing for its pause after the server is back.
_CHANNEL = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 400),
]
_CONNECTION_ERRORS = (
    ConnectionError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError
)  # fmt: skip


@dataclass
class Outcome:
    """How one request of one client ended."""

    model: str
    protocol: str
    start_s: float
    end_s: float = 0.0
    kind: str = ""
    text: str = ""
    num_tokens: int = 0
    first_token_s: float = 0.0
    longest_gap_s: float = 0.0


@contextlib.contextmanager
def running(load: Load) -> Iterator[Load]:
    """The load runs in a thread during the block; its last requests end with the block."""
    clients = threading.Thread(target=asyncio.run, args=(load.run(),), daemon=True)
    clients.start()
    try:
        yield load
    finally:
        load.is_stopping = True
        clients.join(2 * load.deadline_s)
    assert not clients.is_alive(), "clients did not end within twice their deadline"


class RetryableError(Exception):
    """The server answered that the same request may succeed later."""


class FailedError(Exception):
    """The server answered with an error without a remedy, or broke the protocol."""


@dataclass
class Load:
    """Clients that send random cases one after another until a stop."""

    server: Served
    cases: list[Case]
    num_clients: int = 64
    deadline_s: float = 120.0
    think_s: float = 0.5
    cancelled_share: float = 0.03
    seed: int = 1
    outcomes: list[Outcome] = field(default_factory=list)
    is_stopping: bool = False

    async def run(self) -> None:
        """Send requests until `is_stopping`, and wait for the last requests."""
        url = self.server.url("")
        target = f"{self.server.address}:{self.server.grpc_port}"
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session,
            grpc_client.InferenceServerClient(target, channel_args=_CHANNEL) as stub,
        ):
            streams = (HttpStream(session), HttpUnary(session), GrpcStream(stub))
            chosen = [streams[(0, 0, 1, 2)[n % 4]] for n in range(self.num_clients)]
            await asyncio.gather(*(self._client(n, s) for n, s in enumerate(chosen)))

    async def _client(self, number: int, protocol: Any) -> None:
        rng = random.Random(self.seed * 1000 + number)
        await asyncio.sleep(rng.uniform(0, self.think_s))
        while not self.is_stopping:
            outcome = await self._one(rng.choice(self.cases), protocol, rng)
            self.outcomes.append(outcome)
            pause_s = rng.uniform(0, 2 * self.think_s)
            await asyncio.sleep(
                pause_s if outcome.kind not in (RETRYABLE, LOST) else _RETRY_PAUSE_S
            )

    async def _one(self, case: Case, protocol: Any, rng: random.Random) -> Outcome:
        stop_after = 0
        if rng.random() < self.cancelled_share:
            stop_after = rng.randint(1, case.num_tokens - 1)
        outcome = Outcome(case.model, protocol.name, time.monotonic())
        try:
            outcome.kind, outcome.text = await asyncio.wait_for(
                _ask(case, protocol, stop_after, outcome), self.deadline_s
            )
        except asyncio.TimeoutError:
            outcome.kind, outcome.text = LATE, f"no end within {self.deadline_s:g} s"
        except RetryableError as error:
            outcome.kind, outcome.text = RETRYABLE, str(error)
        except _CONNECTION_ERRORS as error:
            outcome.kind, outcome.text = LOST, f"{type(error).__name__}: {error}"
        except Exception as error:
            # Every exception of a client library is an outcome of this request.
            outcome.kind, outcome.text = FAILED, f"{type(error).__name__}: {error}"
        outcome.end_s = time.monotonic()
        return outcome


async def _ask(case: Case, protocol: Any, stop_after: int, outcome: Outcome) -> tuple[str, str]:
    """Kind and text of the end of one request; fills in the outcome's figures."""
    got: list[int] = []
    last_s = outcome.start_s
    stream = protocol.tokens(case)
    try:
        async for ids in stream:
            now_s = time.monotonic()
            if not got:
                outcome.first_token_s = now_s - outcome.start_s
            else:
                outcome.longest_gap_s = max(outcome.longest_gap_s, now_s - last_s)
            last_s = now_s
            got += ids
            outcome.num_tokens = len(got)
            if tuple(got) != case.answer[: len(got)]:
                return WRONG, f"got {got}, not {list(case.answer)}"
            if stop_after and len(got) >= stop_after:
                return CANCELLED, ""
    finally:
        await stream.aclose()
    if len(got) != len(case.answer):
        return WRONG, f"ended after {len(got)} of {len(case.answer)} tokens"
    return RIGHT, ""


class HttpStream:
    """Server-sent events of the generate extension."""

    name = "http stream"

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def tokens(self, case: Case) -> AsyncIterator[list[int]]:
        """The ids of each event."""
        path = f"/v2/models/{case.model}/generate_stream"
        async with self._session.post(path, json=case.body(streaming=True)) as reply:
            await _check(reply)
            async for line in reply.content:
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise _error_of(event["error"])
                yield _as_list(event["output_ids"])


class HttpUnary:
    """One answer with all tokens."""

    name = "http"

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def tokens(self, case: Case) -> AsyncIterator[list[int]]:
        """All ids at once."""
        path = f"/v2/models/{case.model}/generate"
        async with self._session.post(path, json=case.body(streaming=False)) as reply:
            await _check(reply)
            yield _as_list((await reply.json())["output_ids"])


class GrpcStream:
    """ModelStreamInfer, one stream a request."""

    name = "grpc stream"

    def __init__(self, stub: grpc_client.InferenceServerClient) -> None:
        self._stub = stub

    async def tokens(self, case: Case) -> AsyncIterator[list[int]]:
        """The ids of each response."""

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": case.model,
                "inputs": _tensors(case),
                "enable_empty_final_response": True,
            }

        try:
            responses = self._stub.stream_infer(requests())
            async for result, error in responses:
                if error is not None:
                    raise _error_of(str(error))
                ids = result.as_numpy("output_ids")
                if ids is not None:
                    yield [int(i) for i in ids.reshape(-1)]
                if result.get_response().parameters["triton_final_response"].bool_param:
                    return
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConnectionError(error.details()) from None
            raise


async def _check(reply: aiohttp.ClientResponse) -> None:
    if reply.status == 200:
        return
    text = await reply.text()
    if reply.status == 503 and "Retry-After" in reply.headers:
        raise RetryableError(text)
    raise FailedError(f"status {reply.status}: {text}")


def _error_of(text: str) -> Exception:
    """An error inside a stream has only its text to say that a retry may help."""
    hints = ("the engine of model", "try again", "is not at ready state")
    is_retryable = any(hint in text for hint in hints)
    return RetryableError(text) if is_retryable else FailedError(text)


def _as_list(ids: int | list[int]) -> list[int]:
    return ids if isinstance(ids, list) else [ids]


def _tensors(case: Case) -> list[grpc_client.InferInput]:
    values: list[tuple[str, Any, str]] = [
        ("input_ids", np.array([case.prompt], np.int32), "INT32"),
        ("input_lengths", np.array([[len(case.prompt)]], np.int32), "INT32"),
        ("request_output_len", np.array([[case.num_tokens]], np.int32), "INT32"),
        ("end_id", np.array([[-1]], np.int32), "INT32"),
        ("exclude_input_in_output", np.array([[True]]), "BOOL"),
        ("streaming", np.array([[True]]), "BOOL"),
    ]
    tensors = []
    for name, array, datatype in values:
        tensor = grpc_client.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors
