"""Messages to front ends over real sockets, while large payloads are written aside."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.unit.worker.serving.test_frontend_link import HELLO, Frontend, open_link, output
from trimaran.comm.messages.bulk import unpack
from trimaran.comm.messages.messages import Message
from trimaran.worker.serving.frontend_link import FrontendLinks
from trimaran.worker.serving.outbox import Outbox

LARGE = 24 << 20


@pytest.fixture
def wake_fd():
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def frontends(tmp_path):
    found = [Frontend(f"unix:{tmp_path}/{number}.sock") for number in range(2)]
    yield found
    for frontend in found:
        frontend.close()


@pytest.fixture
def links(frontends, wake_fd):
    links = FrontendLinks(tuple(each.address for each in frontends), HELLO, wake_fd)
    yield links
    links.close()


def step(number: int, num_bytes: int) -> Message:
    """A step's message with logits of ``num_bytes``."""
    message = output(0)
    message.step = number
    if num_bytes:
        message.extras = {0: {"context_logits": [memoryview(bytes([number]) * num_bytes)]}}
    return message


def deliver(links: FrontendLinks, outbox: Outbox) -> None:
    """Flush until no message waits."""
    deadline = time.monotonic() + 60
    while outbox.is_waiting and time.monotonic() < deadline:
        outbox.flush()
        links.poll(is_busy=True, wait_s=0.001)
    assert not outbox.is_waiting


def test_messages_keep_their_order_behind_a_message_in_writing(frontends, links):
    outbox = Outbox(links)
    first, second = (open_link(frontend, links) for frontend in frontends)
    for number, num_bytes in enumerate((0, LARGE, 0, LARGE, 100), 1):
        outbox.send(first, step(number, num_bytes))
    outbox.send(second, step(9, 0))
    # The other front end gets its message without waiting.
    assert frontends[1].receive().step == 9
    deliver(links, outbox)

    received = [frontends[0].receive() for _ in range(5)]
    assert [message.step for message in received] == [1, 2, 3, 4, 5]
    for message, num_bytes in zip(received, (0, LARGE, 0, LARGE, 100), strict=True):
        extras = unpack(message)
        if num_bytes:
            (logits,) = extras[0]["context_logits"]
            assert len(logits) == num_bytes and logits[-1] == message.step
    assert outbox.num_held == 2
    outbox.release(first, [message.bulk[-1] for message in received if message.bulk])
    assert outbox.num_held == 0
    outbox.close()


def test_messages_for_a_lost_front_end_are_freed(frontends, links):
    outbox = Outbox(links)
    source = open_link(frontends[0], links)
    outbox.send(source, step(1, LARGE))
    frontends[0].hang_up()
    deadline = time.monotonic() + 60
    while links.is_open(source) and time.monotonic() < deadline:
        links.poll(is_busy=True, wait_s=0.001)
    outbox.drop(source)
    deliver(links, outbox)
    assert outbox.num_held == 0
    outbox.close()


def test_a_step_does_not_wait_for_a_message_in_writing(frontends, links):
    outbox = Outbox(links)
    first, second = (open_link(frontend, links) for frontend in frontends)
    is_free = threading.Event()
    outbox._writer.submit(is_free.wait, 60)
    outbox.send(first, step(1, LARGE))
    outbox.send(first, step(2, 100))
    outbox.flush()
    assert outbox.is_waiting
    # Small payloads need no writer.
    outbox.send(second, step(3, 100))
    assert frontends[1].receive().step == 3

    is_free.set()
    deliver(links, outbox)

    assert [frontends[0].receive().step for _ in range(2)] == [1, 2]
    outbox.close()


def test_a_payload_that_cannot_be_written_is_an_error_of_the_step(
    frontends, links, monkeypatch
):
    outbox = Outbox(links)
    source = open_link(frontends[0], links)

    def full(receiver, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox._bulk, "put", full)
    outbox.send(source, step(1, LARGE))

    with pytest.raises(OSError, match="No space left"):
        deliver(links, outbox)
    outbox.close()
