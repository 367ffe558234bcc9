"""Requests of which no reader is left."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from trimaran.comm.messages.messages import FinishReason, Submit, pack_ids
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.server.engines.live_request import LiveRequest


class Reader:
    """Listens to a request that it refers to, as a job does."""

    def __init__(self, request: LiveRequest) -> None:
        self.request = request
        request.on_news = self.look

    def look(self) -> None:
        """See `LiveRequest.on_news`."""


def test_what_nobody_will_read_is_freed_at_once_also_without_a_collection():
    submit = Submit(
        request_id=1, model="m", prompt_ids=pack_ids([1]), output_ids=pack_ids([]),
        sampling=SamplingParams(max_tokens=9).to_wire(), streaming=True,
    )  # fmt: skip
    cancelled: list[LiveRequest] = []
    request = LiveRequest(
        submit, cancelled.append, lambda gap, count: None, lambda live, wait: None
    )
    reader = Reader(request)
    logits = np.zeros(100)
    unread = weakref.ref(logits)
    gc.disable()
    try:
        request.push([5], FinishReason.NOT_FINISHED, {"generation_logits": [logits]})
        del logits
        request.abandon()
        assert cancelled == [request] and request.is_over
        assert unread() is None
        ended = weakref.ref(reader)
        del reader, request
        cancelled.clear()
        assert ended() is None
    finally:
        gc.enable()
