"""Rank 0's connections to front ends, over real sockets."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import replace

import pytest

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import (
    Cancel,
    EngineHello,
    FrameBuffer,
    FrontendHello,
    Message,
    Ping,
    Pong,
    StepOutput,
    Stop,
    encode,
)
from trimaran.comm.transport.greeting import ListenerGreeting
from trimaran.comm.transport.sockets import Address
from trimaran.worker.serving import frontend_link
from trimaran.worker.serving.frontend_link import Arrival, FrontendLinks
from trimaran.worker.serving.serve_loop import LeaderLoop

HELLO = EngineHello(token="t", model="m", group="g", facts={"world_size": 2})


class Frontend:
    """The front end: listens and accepts engines."""

    def __init__(self, address: str) -> None:
        self._listener = Address.parse(address).listen()
        self._listener.settimeout(60.0)
        host_port = self._listener.getsockname()
        self.address = (
            address if address.startswith("unix") else f"tcp:127.0.0.1:{host_port[1]}"
        )
        self._inbox = FrameBuffer()
        self._messages: list[Message] = []

    def accept(self, links: FrontendLinks, answer: FrontendHello) -> EngineHello:
        self.meet(links)
        links.poll(is_busy=True)
        hello = self.receive()
        self.send(answer)
        return hello

    def meet(self, links: FrontendLinks) -> None:
        """Accept the connection; over TCP both ends prove the token."""
        links.poll(is_busy=True)
        self.sock, _ = self._listener.accept()
        self.sock.settimeout(60.0)
        if self.address.startswith("unix"):
            return
        greeting = ListenerGreeting(HELLO.token.encode())
        self.sock.sendall(greeting.opening)
        while greeting.num_missing:
            poll_until_readable(links, self.sock)
            self.sock.sendall(greeting.feed(self.sock.recv(greeting.num_missing)))
        poll_until_readable(links, self.sock)

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(encode(message) for message in messages))

    def receive(self) -> Message:
        while not self._messages:
            self._messages += self._inbox.feed(self.sock.recv(65536))
        return self._messages.pop(0)

    def hang_up(self) -> None:
        self.sock.close()
        self._inbox = FrameBuffer()

    def close(self) -> None:
        self._listener.close()
        if hasattr(self, "sock"):
            self.sock.close()


class StoppedEngine:
    """Records the requests of stop messages."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stop(self, client_request_id: str) -> None:
        self.stopped.append(client_request_id)


@pytest.fixture(params=["unix", "tcp"])
def frontend(request, tmp_path) -> Frontend:
    address = f"unix:{tmp_path}/fe.sock" if request.param == "unix" else "tcp:127.0.0.1:0"
    frontend = Frontend(address)
    yield frontend
    frontend.close()


@pytest.fixture
def wake_fd() -> int:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


@pytest.fixture
def links(frontend, wake_fd) -> FrontendLinks:
    links = FrontendLinks((frontend.address,), HELLO, wake_fd)
    yield links
    links.close()


def output(num_bytes: int) -> StepOutput:
    return StepOutput(
        step=1,
        request_ids=b"",
        sequence_indices=b"",
        num_tokens=b"",
        finish_reasons=b"",
        token_ids=bytes(num_bytes),
    )


def poll_until_readable(links: FrontendLinks, sock: socket.socket) -> None:
    deadline = time.monotonic() + 60.0
    while not select.select([sock], [], [], 0.001)[0] and time.monotonic() < deadline:
        links.poll(is_busy=True)


def poll_for(links: FrontendLinks, count: int) -> list[Arrival]:
    """Poll until that many arrivals are there."""
    arrivals: list[Arrival] = []
    deadline = time.monotonic() + 60.0
    while len(arrivals) < count and time.monotonic() < deadline:
        arrivals += links.poll(is_busy=True)
    return arrivals


def open_link(frontend: Frontend, links: FrontendLinks) -> int:
    """Connect; returns the source of the open connection."""
    frontend.accept(links, FrontendHello())
    frontend.send(Cancel(request_ids=[0]))
    (arrival,) = poll_for(links, 1)
    return arrival.source


def test_the_engine_sends_its_facts_and_receives_requests(frontend, links):
    hello = frontend.accept(links, FrontendHello())
    frontend.send(Cancel(request_ids=[1]), Cancel(request_ids=[2]))

    arrivals = poll_for(links, 2)

    is_far = frontend.address.startswith("tcp")
    assert hello == (replace(HELLO, token="") if is_far else HELLO)
    assert [arrival.message.request_ids for arrival in arrivals] == [[1], [2]]
    assert links.num_open == 1


def test_outputs_go_to_the_front_end_of_their_request(frontend, links):
    source = open_link(frontend, links)

    links.send(source, output(8))
    links.send(source + 1, output(16))
    links.send(source, output(24))

    assert [len(frontend.receive().token_ids) for _ in range(2)] == [8, 24]


def test_a_stop_reaches_requests_of_other_front_ends(frontend, links, tmp_path, wake_fd):
    another = Frontend(f"unix:{tmp_path}/another.sock")
    links = FrontendLinks((frontend.address, another.address), HELLO, wake_fd)
    engine = StoppedEngine()
    loop = LeaderLoop(engine, links, None, None, None, stats_period_ms=1000)
    open_link(another, links)
    open_link(frontend, links)

    frontend.send(Stop(client_request_id="a"))
    (arrival,) = poll_for(links, 1)
    loop._take(arrival)
    links.send_all(Ping())

    assert engine.stopped == ["a"]
    assert another.receive() == Stop(client_request_id="a")
    # The front end of the stop cancels its own requests.
    assert [type(each.receive()) for each in (another, frontend)] == [Ping, Ping]
    links.close()
    another.close()


def test_a_lost_front_end_is_reported_once_and_reconnected(frontend, links):
    source = open_link(frontend, links)
    frontend.hang_up()

    lost = poll_for(links, 1)
    time.sleep(0.06)
    again = open_link(frontend, links)

    assert lost == [Arrival(source, None)]
    assert again != source


def test_connections_to_a_front_end_are_tried_until_the_front_end_listens(tmp_path, wake_fd):
    links = FrontendLinks((f"unix:{tmp_path}/late.sock",), HELLO, wake_fd)
    links.poll(is_busy=True)
    frontend = Frontend(f"unix:{tmp_path}/late.sock")
    time.sleep(0.06)

    assert open_link(frontend, links) > 0
    links.close()
    frontend.close()


def test_a_slow_front_end_does_not_delay_steps(frontend, links):
    source = open_link(frontend, links)
    sent = [output(100_000 + i) for i in range(50)]

    for message in sent:
        links.send(source, message)
    received: list[int] = []
    reader = threading.Thread(
        target=lambda: received.extend(len(frontend.receive().token_ids) for _ in sent)
    )
    reader.start()
    while reader.is_alive():
        links.poll(is_busy=True)
    reader.join()

    assert received == [100_000 + i for i in range(50)]


def test_a_front_end_that_never_reads_is_disconnected(frontend, links, monkeypatch):
    monkeypatch.setattr(frontend_link, "MAX_UNSENT_BYTES", 1 << 20)
    source = open_link(frontend, links)

    for _ in range(100):
        links.send(source, output(100_000))

    assert poll_for(links, 1) == [Arrival(source, None)]
    assert links.num_open == 0


def test_a_refusal_is_an_error_that_says_why(frontend, links):
    frontend.accept(links, FrontendHello(accepted=False, reason="token differs"))

    with pytest.raises(ProtocolError, match="token differs"):
        poll_for(links, 1)


def test_a_refusal_is_read_from_a_connection_that_the_front_end_has_closed(frontend, links):
    frontend.accept(links, FrontendHello(accepted=False, reason="token differs"))
    frontend.hang_up()
    time.sleep(0.05)

    with pytest.raises(ProtocolError, match="token differs"):
        poll_for(links, 1)


def test_a_greeting_may_arrive_in_several_packets(frontend, links):
    frontend.meet(links)
    greeting = encode(FrontendHello())
    frontend.sock.sendall(greeting[:5])
    for _ in range(20):
        assert links.poll(is_busy=True, wait_s=0.001) == []
    assert links.num_open == 0

    frontend.sock.sendall(greeting[5:])
    frontend.send(Cancel(request_ids=[7]))

    (arrival,) = poll_for(links, 1)
    assert arrival.message == Cancel(request_ids=[7])


def test_a_front_end_without_a_greeting_is_disconnected(frontend, wake_fd, monkeypatch):
    monkeypatch.setattr(frontend_link, "_HELLO_TIMEOUT_S", 0.1)
    links = FrontendLinks((frontend.address,), HELLO, wake_fd)
    links.poll(is_busy=True)
    frontend.sock, _ = frontend._listener.accept()
    frontend.sock.settimeout(0.001)
    heard, deadline = [b"-"], time.monotonic() + 60.0
    while heard[-1] and time.monotonic() < deadline:
        links.poll(is_busy=True)
        with contextlib.suppress(TimeoutError):
            heard.append(frontend.sock.recv(65536))

    assert heard[-1] == b""
    links.close()


def test_a_front_end_may_be_silent_after_the_greeting(frontend, wake_fd, monkeypatch):
    monkeypatch.setattr(frontend_link, "_HELLO_TIMEOUT_S", 0.5)
    links = FrontendLinks((frontend.address,), HELLO, wake_fd)
    source = open_link(frontend, links)
    time.sleep(0.6)

    assert links.poll(is_busy=True) == []

    assert links.is_open(source)
    links.close()


def test_a_ping_is_answered_and_not_passed_on(frontend, links):
    open_link(frontend, links)
    frontend.send(Ping(payload=3), Cancel(request_ids=[5]))

    (arrival,) = poll_for(links, 1)

    assert arrival.message == Cancel(request_ids=[5])
    assert frontend.receive() == Pong(payload=3)


def test_an_idle_engine_sleeps_until_a_message_wakes_the_engine(frontend, links, wake_fd):
    open_link(frontend, links)
    timer = threading.Timer(0.3, os.eventfd_write, (wake_fd, 1))
    timer.start()
    before = time.thread_time()

    assert links.poll(is_busy=False) == []

    assert time.thread_time() - before < 0.05
    timer.join()


def test_outputs_queued_before_the_close_still_arrive(frontend, links):
    source = open_link(frontend, links)

    links.send(source, output(40))
    links.close()

    assert len(frontend.receive().token_ids) == 40
    with pytest.raises(StopIteration):
        next(_rest_of(frontend.sock))


def _rest_of(sock: socket.socket):
    """The bytes until the peer closes the connection."""
    while data := sock.recv(4096):
        yield data
