"""One request of a Python model in the front end, and the queue in which it waits."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ErrorKind, RefusedError, RequestError, with_request_id
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.queue_policy import QueuePolicy
from trimaran.server.inference.request import InferRequest
from trimaran.server.python_models.wire import (
    NULL_KEY,
    Packed,
    RequestFields,
    Respond,
    pack_in_chunks,
)

MAX_UNREAD_BYTES, UNREAD_S = 256 << 20, 30.0
"""Bytes and seconds: a request with more unread bytes, of which the client has read none for
that time, fails with its next response. Its process cannot wait: it serves other requests too.
"""

MOST_UNREAD_BYTES = 4 * MAX_UNREAD_BYTES
"""A request with more unread bytes fails, even if its client reads steadily."""

_RESPONSE_BYTES = 1 << 10
"""Bytes of each response in addition to its tensors."""

_keys = itertools.count(1)


class Job:
    """A request and its responses. Pack the request before its execution."""

    def __init__(self, request: InferRequest, *, is_null: bool = False) -> None:
        """A null request fills an empty slot of a batch; its responses are dropped."""
        self.request = request
        self.packed: list[Packed] = []
        """The inputs of the client."""
        self.sequence_inputs: list[Packed] = []
        """The inputs that the model's ``sequence_batching`` adds."""
        self.take_states: Callable[[list[Packed]], list[Packed]] | None = None
        """Keeps the states among a response's tensors, and returns the client's tensors."""
        self.sequence_id = request.sequence_id
        self.flags = request.sequence_start + 2 * request.sequence_end
        self.key = NULL_KEY if is_null else next(_keys)
        self.arrived_s = time.monotonic()
        first = next(iter(request.inputs.values()), None)
        self.batch_size = first.shape[0] if first is not None and first.shape else 1
        self._responses: deque[Respond | RequestError] = deque()
        self._unread_bytes = 0
        self._unread_since_s = self.arrived_s
        self._waiter: asyncio.Future[None] | None = None

    async def pack(self) -> None:
        """Make the inputs ready for the wire."""
        for tensor in self.request.inputs.values():
            self.packed.append(await run_cooperatively(pack_in_chunks(tensor)))

    def take(self, response: Respond | RequestError) -> None:
        """A response or the request's error arrived."""
        if self.take_states is not None and isinstance(response, Respond) and response.tensors:
            response.tensors = self.take_states(response.tensors)
        if not self._responses:
            self._unread_since_s = time.monotonic()
        self._unread_bytes += _num_bytes(response)
        self._responses.append(response)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def is_overrun(self) -> bool:
        """Whether the reader is too slow for another response."""
        if self._unread_bytes > MOST_UNREAD_BYTES:
            return True
        return self._unread_bytes > MAX_UNREAD_BYTES and self._unread_s > UNREAD_S

    @property
    def _unread_s(self) -> float:
        return time.monotonic() - self._unread_since_s

    def overrun(self) -> None:
        """Drop the unread responses."""
        what, limit = "fell behind", MOST_UNREAD_BYTES
        if self._unread_s > UNREAD_S:
            what, limit = f"read nothing for {UNREAD_S:g} s", MAX_UNREAD_BYTES
        text = (
            f"the client {what} while {len(self._responses)} "
            f"responses of model '{self.request.model_name}' waited, of "
            f"{self._unread_bytes >> 20} MiB (limit {limit >> 20} MiB). Read them "
            "as they come, or ask for fewer."
        )
        self._responses.clear()
        self.take(RequestError(text, ErrorKind.UNAVAILABLE))

    async def next(self) -> Respond:
        """The next response.

        Raises:
            RequestError: the request failed.
        """
        while not self._responses:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        response = self._responses.popleft()
        if isinstance(response, RequestError):
            raise response
        self._unread_bytes -= _num_bytes(response)
        self._unread_since_s = time.monotonic()
        return response

    def fields(self) -> RequestFields:
        """The request for the wire."""
        request = self.request
        return RequestFields(
            key=self.key,
            model=request.model_name,
            version=request.model_version,
            id=request.id,
            # Sending changes a packed tensor, and a job may be executed again.
            inputs=[list(packed) for packed in (*self.packed, *self.sequence_inputs)],
            outputs=list(request.outputs),
            parameters=dict(request.parameters),
            priority=request.priority,
            timeout_us=request.timeout_us,
            correlation_id=self.sequence_id,
            flags=self.flags,
        )


def _num_bytes(response: Respond | RequestError) -> int:
    if isinstance(response, RequestError):
        return 0
    return _RESPONSE_BYTES + sum(len(packed[3]) for packed in response.tensors or ())


def ragged_inputs(config: ModelConfig) -> frozenset[str]:
    """The inputs whose shapes may differ in a batch."""
    return frozenset(each.name for each in config.input if each.allow_ragged_batch)


def batch_shapes(job: Job, ragged: Collection[str]) -> dict[str, tuple[int, ...] | None]:
    """What requests of one batch have in common."""
    return {
        name: None if name in ragged else tensor.shape[1:]
        for name, tensor in job.request.inputs.items()
    }


class JobQueue:
    """Jobs in the order of priority and arrival, given out in batches.

    Without ``dynamic_batching`` a batch is one request. With it, a batch has as many requests
    as fit into ``max_batch_size``. Their inputs have equal names, and equal shapes except for
    the first dimension and for ragged inputs.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._policy = QueuePolicy(config)
        self._jobs: list[Job] = []
        self._ragged = ragged_inputs(config)
        batching = config.dynamic_batching
        batches = config.HasField("dynamic_batching") and config.max_batch_size > 0
        self._max_batch_size = config.max_batch_size if batches else 0
        self._preferred: Sequence[int] = sorted(batching.preferred_batch_size)
        self._delay_s = batching.max_queue_delay_microseconds / 1e6 if batches else 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        """Add a job.

        Raises:
            RefusedError: the queue of its priority is full.
        """
        level = self._policy.level(job.request)
        first = bisect.bisect_left(self._jobs, level, key=self._level)
        end = bisect.bisect_right(self._jobs, level, key=self._level)
        limit = self._policy.max_queue_size(level)
        if limit and end - first >= limit:
            place = f" at priority level {level}" if level else ""
            text = f"Exceeds maximum queue size: {limit} requests wait{place}. Try again later."
            raise RefusedError(with_request_id(job.request.id, text))
        self._jobs.insert(end, job)

    def remove(self, job: Job) -> bool:
        """Remove a job; whether it was still waiting."""
        if job not in self._jobs:
            return False
        self._jobs.remove(job)
        return True

    def drain(self) -> list[Job]:
        """Remove all jobs."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def timeout_s(self, job: Job) -> float:
        """The longest queueing delay of this job; 0 is unlimited."""
        return self._policy.timeout_s(job.request)

    def wait_s(self) -> float:
        """Seconds until the next batch is due; 0 means now."""
        if not self._delay_s:
            return 0.0
        batch = self._next()
        size = sum(job.batch_size for job in batch)
        if size >= (self._preferred[0] if self._preferred else self._max_batch_size):
            return 0.0
        oldest = min((job.arrived_s for job in batch), default=0.0)
        return max(0.0, oldest + self._delay_s - time.monotonic())

    def place(self, free: Sequence[int]) -> tuple[int | None, float]:
        """The first free instance, if a batch is due; else None, with the seconds until then.
        The seconds are infinite without a request.
        """
        if not self._jobs or not free:
            return None, math.inf
        wait_s = self.wait_s()
        return (None, wait_s) if wait_s else (free[0], 0.0)

    def take(self, _instance: int = 0) -> list[Job]:
        """The next batch, which any instance may execute."""
        batch = self._next()
        for job in batch:
            self._jobs.remove(job)
        return batch

    def _next(self) -> list[Job]:
        if not self._max_batch_size:
            return self._jobs[:1]
        batch: list[Job] = []
        size = 0
        for job in self._jobs:
            if batch and batch_shapes(job, self._ragged) != batch_shapes(
                batch[0], self._ragged
            ):
                continue
            if size + job.batch_size > self._max_batch_size:
                break
            batch.append(job)
            size += job.batch_size
        return batch

    def _level(self, job: Job) -> int:
        return self._policy.level(job.request)
