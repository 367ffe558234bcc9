"""Requests with a slow or disconnected reader."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.engines.group import EngineGroup
from trimaran.server.engines.live_request import LiveRequest
from trimaran.server.engines.unread_logits import UnreadLogits


class Reader:
    """A listener with a reference to its request, like a job."""

    def __init__(self, request: LiveRequest) -> None:
        self.request = request
        request.on_output = self.look

    def look(self) -> None:
        """See `LiveRequest.on_output`."""


def _submitted(cancelled: list[LiveRequest], unread: UnreadLogits | None = None) -> LiveRequest:
    submit = Submit(
        request_id=1, model="m", prompt_ids=pack_ids([1]), output_ids=pack_ids([]),
        sampling=SamplingParams(max_tokens=9).to_wire(), streaming=True,
    )  # fmt: skip
    return LiveRequest(
        submit, cancelled.append, lambda gap, count: None, lambda live, wait: None,
        unread or UnreadLogits(1 << 20),
    )  # fmt: skip


def test_a_slow_reader_gets_large_logits_in_parts():
    request = _submitted([])
    row = bytes(75 << 10)
    first = {"generation_logits": [row], "context_logits": [row], "logits_dtype": "float32"}
    request.push([0], FinishReason.NOT_FINISHED, first)
    for token in range(1, 7):
        extras = {"generation_logits": [row]}
        request.push([token], FinishReason.NOT_FINISHED, extras)
    request.push([], FinishReason.LENGTH, {"figures": {"kv_cache_reused_blocks": 1}})

    chunks = []
    while request.has_output:
        chunks.append(request.take())

    assert [chunk.token_ids for chunk in chunks] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(chunk.extras["generation_logits"]) for chunk in chunks] == [3, 3, 1]
    assert ["context_logits" in chunk.extras for chunk in chunks] == [True, False, False]
    assert all(chunk.extras["logits_dtype"] == "float32" for chunk in chunks)
    assert [chunk.is_last for chunk in chunks] == [False, False, True]
    assert chunks[-1].extras["figures"] == {"kv_cache_reused_blocks": 1}


def test_the_stream_with_most_unread_logits_is_ended_beyond_the_limit_of_all():
    cancelled: list[LiveRequest] = []
    unread = UnreadLogits(1000)
    slow, other, fast = (_submitted(cancelled, unread) for _ in range(3))
    for token in range(11):
        for request, size in ((slow, 60), (other, 20), (fast, 50)):
            if not request.is_over:
                extras = {"generation_logits": [bytes(size)]}
                request.push([token], FinishReason.NOT_FINISHED, extras)
        assert len(fast.take().token_ids) == 1
        assert unread.num_bytes <= 1000
    assert cancelled == []

    for token in range(11, 15):
        slow.push([token], FinishReason.NOT_FINISHED, {"generation_logits": [bytes(60)]})
        if slow.is_over:
            break

    assert cancelled == [slow]
    with pytest.raises(RequestError, match=r"not read 840 bytes .* --max-unread-logits-bytes"):
        slow.take()
    assert unread.num_bytes == 11 * 20
    assert other.take().token_ids == list(range(11))
    assert unread.num_bytes == 0


def test_a_stream_that_ended_unread_is_told_that_it_was_cut_off():
    cancelled: list[LiveRequest] = []
    unread = UnreadLogits(1000)
    ended, running = _submitted(cancelled, unread), _submitted(cancelled, unread)
    ended.push([1], FinishReason.LENGTH, {"generation_logits": [bytes(600)]})
    running.push([1], FinishReason.NOT_FINISHED, {"generation_logits": [bytes(500)]})
    assert cancelled == [] and not running.is_over
    with pytest.raises(RequestError, match="not read 600 bytes"):
        ended.take()
    running.abandon()
    assert unread.num_bytes == 0


def test_the_prompts_logits_of_a_stream_count_until_the_stream_is_over():
    cancelled: list[LiveRequest] = []
    unread = UnreadLogits(1000)
    first, last = _submitted(cancelled, unread), _submitted(cancelled, unread)
    for request in (first, last):
        request.push([1], FinishReason.NOT_FINISHED, {"context_logits": [bytes(450)]})
        request.take()
    assert (unread.num_bytes, unread.num_whole_bytes) == (0, 900)
    third = _submitted(cancelled, unread)
    third.push([1], FinishReason.NOT_FINISHED, {"context_logits": [bytes(450)]})
    assert cancelled == [third]
    with pytest.raises(RequestError, match="hold 1350 bytes of logits"):
        third.take()
    first.abandon()
    last.abandon()
    assert unread.num_whole_bytes == 0


def test_unread_outputs_are_freed_at_once_without_garbage_collection():
    cancelled: list[LiveRequest] = []
    request = _submitted(cancelled)
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


def test_the_limit_on_unread_logits_has_room_for_512_tokens_of_an_engine():
    by_engines, is_set = UnreadLogits(), UnreadLogits(1000)
    for unread in (by_engines, is_set):
        unread.fit(1 << 19)
        unread.fit(1 << 10)
    cancelled: list[LiveRequest] = []
    request = _submitted(cancelled, by_engines)
    by_engines.hold(request, 512 << 19)
    assert cancelled == []
    by_engines.hold(request, (512 << 19) + 1)
    assert cancelled == [request]
    other = _submitted(cancelled, is_set)
    is_set.hold(other, 1001)
    assert cancelled == [request, other]


def _whole(cancelled: list[LiveRequest], unread: UnreadLogits) -> LiveRequest:
    request = _submitted(cancelled, unread)
    request.submit.streaming = False
    return request


def test_of_answers_with_too_many_logits_together_the_last_one_to_begin_ends():
    cancelled: list[LiveRequest] = []
    unread = UnreadLogits(1000)
    first, last = _whole(cancelled, unread), _whole(cancelled, unread)
    for request in (first, last):
        request.push([1], FinishReason.NOT_FINISHED, {"generation_logits": [bytes(450)]})
    assert cancelled == []

    first.push([2], FinishReason.NOT_FINISHED, {"generation_logits": [bytes(450)]})
    assert cancelled == [last]
    with pytest.raises(RequestError, match=r"hold 1350 bytes .* --max-unread-logits-bytes"):
        last.take()

    first.push([3], FinishReason.LENGTH, {"generation_logits": [bytes(450)]})
    assert first.take().token_ids == [1, 2, 3]
    assert unread.num_whole_bytes == 1350
    first.abandon()
    last.abandon()
    assert unread.num_whole_bytes == 0


def test_the_sequences_of_one_answer_may_hold_more_logits_than_several_answers():
    cancelled: list[LiveRequest] = []
    unread, answer = UnreadLogits(1000), object()
    sequences = [_whole(cancelled, unread) for _ in range(3)]
    for request in sequences:
        request.answer = answer
        request.push([1], FinishReason.LENGTH, {"generation_logits": [bytes(450)]})
    later = _whole(cancelled, unread)
    later.push([1], FinishReason.NOT_FINISHED, {"generation_logits": [bytes(5)]})
    assert cancelled == [later]
    for request in sequences:
        assert request.take().token_ids == [1]
        request.abandon()
    assert unread.num_whole_bytes == 0


def test_a_stream_that_is_cut_off_in_a_step_does_not_count_as_finished():
    ended: list[LiveRequest] = []
    group = EngineGroup("g0", ended.append)

    def cancel(request: LiveRequest) -> None:
        group.remove(request.request_id)

    request = LiveRequest(
        Submit(request_id=3, model="m", prompt_ids=b"", streaming=True),
        cancel, lambda gap: None, lambda request, seconds: None, UnreadLogits(1000),
    )  # fmt: skip
    group.take(request)
    step = StepOutput(
        step=1,
        request_ids=(3).to_bytes(8, "little"),
        sequence_indices=bytes(2),
        num_tokens=(1).to_bytes(2, "little"),
        finish_reasons=bytes(1),
        token_ids=bytes(4),
        extras={0: {"generation_logits": [bytes(2000)]}},
    )
    group.take_step(step)
    assert request.is_over and ended == [] and group.num_requests() == 0


class _Tensors:
    """Stands for the tensors of a client's request."""


def test_the_tensors_of_a_refused_request_do_not_wait_for_the_collector():
    def read(request: LiveRequest) -> weakref.ref[_Tensors]:
        tensors = _Tensors()
        with pytest.raises(RequestError, match="refused"):
            request.take()
        return weakref.ref(tensors)

    request = _submitted([])
    request.fail(RequestError("refused"))
    gc.collect()
    gc.disable()
    try:
        assert read(request)() is None
    finally:
        gc.enable()
