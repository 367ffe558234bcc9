"""A step's messages to the front ends; large logits are written in a thread, within limits."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.bulk import BULKY, MAX_REMOTE_BYTES, BulkSender, bulky_bytes, pack
from trimaran.comm.messages.messages import Message, StepOutput, Submit
from trimaran.worker.serving.frontend_link import MAX_UNSENT_BYTES, FrontendLinks

_ASIDE_BYTES = 8 << 20
"""Payloads of this size take longer to write than a step may wait."""


class Outbox:
    """Sends each front end its messages in order. One thread calls it.

    While a large payload is being written, later messages to that front end wait; steps and
    other front ends do not.
    """

    def __init__(self, links: FrontendLinks) -> None:
        self._links = links
        self._bulk = BulkSender()
        self._waiting: dict[int, deque[tuple[Message, Future[None] | None]]] = {}
        self._writer = ThreadPoolExecutor(1, "bulk-writer")

    @property
    def is_waiting(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._waiting)

    def send(self, source: int, message: Message) -> None:
        """Send a message, or queue it behind a payload that is being written."""
        writing: Future[None] | None = None
        if isinstance(message, StepOutput) and message.extras:
            sender = self._bulk if self._links.is_local(source) else None
            if sender is not None and bulky_bytes(message) >= _ASIDE_BYTES:
                writing = self._writer.submit(pack, message, source, sender)
            else:
                pack(message, source, sender)
        if writing is None and source not in self._waiting:
            self._links.send(source, message)
        else:
            self._waiting.setdefault(source, deque()).append((message, writing))

    def flush(self) -> None:
        """Send the messages that are ready."""
        for source, queue in list(self._waiting.items()):
            for message in _take_ready(queue):
                self._links.send(source, message)
                if not self._links.is_open(source):
                    # No front end will read this payload.
                    self._bulk.drop(source)
            if not queue:
                del self._waiting[source]

    def release(self, source: int, numbers: list[int]) -> None:
        """A front end has read these payloads."""
        self._bulk.release(source, numbers)

    def drop(self, source: int) -> None:
        """A front end is lost."""
        self._bulk.drop(source)

    @property
    def num_held(self) -> int:
        """Payloads that front ends have not released."""
        return self._bulk.num_held

    def close(self) -> None:
        """Wait until all payloads are written."""
        self._writer.shutdown()


def _take_ready(
    queue: deque[tuple[Message, Future[None] | None]],
) -> Iterator[Message]:
    while queue:
        message, writing = queue[0]
        if writing is not None:
            if not writing.done():
                return
            writing.result()
        queue.popleft()
        yield message


MAX_BACKLOG_BYTES = MAX_UNSENT_BYTES - (16 << 20)
"""Unread bytes of a front end up to which it is sent logits; the rest is left for the tokens of
other requests."""

_ITEM_BYTES = {"float16": 2}
"""Bytes of a logit of each dtype other than float32."""


def check_remote_logits(message: Submit, vocab_size: int, max_seq_len: int) -> None:
    """Refuse logits that are too large for one message to another host.

    The connection would be dropped for its unread bytes, and with it all of its requests.

    Raises:
        RequestError: names the bytes, the limit and the remedy.
    """
    sampling, num_prompt = message.sampling, len(message.prompt_ids) // 4
    count, width = sampling.get("num_return_sequences", 1), sampling.get("beam_width", 1)
    num_rows = 0
    if sampling.get("return_context_logits"):
        # All sequences of a request may begin in one step; beams share their prompt.
        num_rows = num_prompt * (count if width == 1 else 1)
    if sampling.get("return_generation_logits"):
        is_whole = width > 1 and not message.streaming
        room = max(1, max_seq_len - num_prompt)
        num_tokens = min(sampling.get("max_tokens", room), room) if is_whole else 1
        num_rows = max(num_rows, count * num_tokens)
    num_bytes = num_rows * vocab_size * _ITEM_BYTES.get(sampling.get("logits_dtype", ""), 4)
    if num_bytes > MAX_REMOTE_BYTES:
        raise RequestError(
            f"logits of {num_rows} tokens at once are {num_bytes} bytes, but a front end on "
            f"another host than rank 0 takes {MAX_REMOTE_BYTES}. Shorten the prompt, ask for "
            "fewer sequences or tokens, let beams stream, or set logits_datatype to TYPE_FP16."
        )


def fit_logits(output: StepOutput, num_unsent: int) -> tuple[StepOutput, list[int]]:
    """Fit a step's message to a front end on another host with ``num_unsent`` unread bytes.

    Returns the message, and the requests that must fail because their logits do not fit. The
    first rows have precedence.
    """
    room = MAX_BACKLOG_BYTES - num_unsent
    ids = np.frombuffer(output.request_ids, "<u8")
    failed: dict[int, None] = {}
    for row, extras in output.extras.items():
        items = (item for name in BULKY for item in extras.get(name, ()))
        num_bytes = sum(memoryview(item).nbytes for item in items)
        if num_bytes > room:
            failed[int(ids[row])] = None
        else:
            room -= num_bytes
    return (_without(output, list(failed)) if failed else output), list(failed)


def too_slow(num_unsent: int) -> str:
    """The error text of such a request."""
    return (
        f"the front end, on another host than rank 0, has left {num_unsent} bytes unread, and "
        f"takes logits up to {MAX_BACKLOG_BYTES}: those of all requests at once come faster "
        "than it reads them. Ask for logits in fewer requests at a time, set logits_datatype "
        "to TYPE_FP16, or let a front end on rank 0's host serve them."
    )


def _without(output: StepOutput, request_ids: list[int]) -> StepOutput:
    """The rows of all requests but these."""
    ids, counts = (
        np.frombuffer(output.request_ids, "<u8"),
        np.frombuffer(output.num_tokens, "<u2"),
    )
    kept = ~np.isin(ids, np.array(request_ids, "<u8"))
    tokens = np.frombuffer(output.token_ids, "<i4")[np.repeat(kept, counts)]
    places = np.cumsum(kept) - 1
    return dataclasses.replace(
        output,
        request_ids=ids[kept].tobytes(),
        sequence_indices=np.frombuffer(output.sequence_indices, "<u2")[kept].tobytes(),
        num_tokens=counts[kept].tobytes(),
        finish_reasons=np.frombuffer(output.finish_reasons, np.uint8)[kept].tobytes(),
        token_ids=tokens.tobytes(),
        extras={int(places[row]): x for row, x in output.extras.items() if kept[row]},
    )
