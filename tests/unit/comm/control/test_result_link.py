"""Results reach rank 0 in order, whichever side has to wait, and a failure is reported."""

from __future__ import annotations

import threading

import pytest

from trimaran.comm.control.result_link import ResultReader, ResultWriter, _RingSink, _RingSource
from trimaran.comm.errors import PeerLostError
from trimaran.comm.transport.shared_memory import SharedSegment
from trimaran.comm.transport.shm_ring import RingWriter, ShmRing


@pytest.fixture
def ends():
    """Both ends of a ring, in one process."""
    segment = SharedSegment.create(ShmRing.segment_bytes(1))
    writer = ResultWriter(_RingSink(RingWriter(segment, 1)), 60.0)
    yield writer, ResultReader(_RingSource(segment, 1, 0), 3, 60.0)
    writer.close()


def test_results_that_are_late_or_too_large_keep_their_order(ends):
    writer, reader = ends
    is_there = threading.Event()

    def late() -> bytes:
        is_there.wait()
        return b"late"

    # The ring holds about a million bytes: without a reader, no call waits.
    writer.post(lambda: b"first", is_ready=True)
    writer.post(late, is_ready=False)
    writer.post(lambda: b"x" * 3_000_000, is_ready=True)
    writer.post(lambda: b"last", is_ready=True)
    is_there.set()

    assert [reader.read() for _ in range(2)] == [b"first", b"late"]
    assert len(reader.read()) == 3_000_000
    assert reader.read() == b"last"


def test_errors_of_the_receiver_thread_are_logged_and_raised(ends):
    writer, _ = ends
    told = []
    has_failed = threading.Event()

    def fail() -> bytes:
        raise ValueError("the device is gone")

    writer.on_failure = lambda error: (told.append(error), has_failed.set())
    writer.post(fail, is_ready=False)
    has_failed.wait(60.0)

    assert [str(error) for error in told] == ["the device is gone"]
    with pytest.raises(ValueError, match="the device is gone"):
        writer.post(lambda: b"next", is_ready=True)


def test_a_reader_gives_up_after_its_deadline(ends):
    _, reader = ends
    reader.timeout_s = 0.02

    with pytest.raises(PeerLostError, match=r"rank 3 told no result of a step for 0\.02 s"):
        reader.read()
