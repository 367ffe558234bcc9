"""A child process and its supervisor, over a real socket."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trimaran.comm.env import ChildEnv
from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.messages import (
    ChildConfig,
    ChildHello,
    ChildState,
    Command,
    FrameBuffer,
    Message,
    Ping,
    Pong,
    encode,
)
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.comm.transport.greeting import ListenerGreeting
from trimaran.comm.transport.sockets import Address

CHILD = """
import select, sys, time
from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.supervisor_link import SupervisorLink
link, config = SupervisorLink.connect(ChildEnv.from_environ(), "rank", 1, 2)
link.expect_pings(config["ping_timeout_s"])
link.state("loading", config["text"])
poller = select.poll()
poller.register(link.fileno(), select.POLLIN)
while True:
    poller.poll()
    for command in link.commands():
        if command.verb == "shutdown":
            link.close()
            sys.exit(0)
        if command.verb == "busy":
            link.state("ready", facts={"busy": True})
            while True:
                time.sleep(0.01)
        if command.verb == "hang":
            link.answer_while(lambda: False)
            link.state("ready", "hangs")
            continue
        link.state("ready", command.verb)
"""


class Supervisor:
    """The supervisor's end: accepts one child and exchanges messages with the child."""

    def __init__(self, address: str) -> None:
        self.listener = Address.parse(address).listen()
        if address.startswith("tcp"):
            address = f"tcp:127.0.0.1:{self.listener.getsockname()[1]}"
        self.env = ChildEnv(supervisor=address, token="secret", group="g")
        self.token = b"secret"
        self._inbox = FrameBuffer()
        self._messages: list[Message] = []

    def accept(self) -> None:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(60.0)
        if self.sock.family != socket.AF_UNIX:
            greeting = ListenerGreeting(self.token)
            self.sock.sendall(greeting.opening)
            while greeting.num_missing:
                self.sock.sendall(greeting.feed(self.sock.recv(greeting.num_missing)))

    def receive(self) -> Message:
        while not self._messages:
            self._messages += self._inbox.feed(self.sock.recv(65536))
        return self._messages.pop(0)

    def start_child(self, ping_timeout_s: float = float("inf")) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD],
            env={**self.env.to_environ(), "PATH": "/usr/bin"},
            stderr=subprocess.PIPE,
        )
        self.accept()
        self.hello = self.receive()
        config = {"text": "weights", "ping_timeout_s": ping_timeout_s}
        self.sock.sendall(encode(ChildConfig(config=config)))
        self.first_state = self.receive()
        return process


@pytest.fixture(params=["unix", "tcp"])
def supervisor(request, tmp_path) -> Supervisor:
    address = f"unix:{tmp_path}/s.sock" if request.param == "unix" else "tcp:127.0.0.1:0"
    supervisor = Supervisor(address)
    yield supervisor
    supervisor.listener.close()
    if hasattr(supervisor, "sock"):
        supervisor.sock.close()


def test_a_child_introduces_itself_and_gets_its_configuration(supervisor):
    process = supervisor.start_child()

    hello = supervisor.hello
    assert isinstance(hello, ChildHello)
    shown = "secret" if supervisor.env.supervisor.startswith("unix") else ""
    assert (hello.token, hello.role, hello.group) == (shown, "rank", "g")
    assert (hello.rank, hello.world_size, hello.pid) == (1, 2, process.pid)
    assert supervisor.first_state == ChildState(state="loading", text="weights")
    supervisor.sock.sendall(encode(Command(verb="shutdown")))
    assert process.wait(60) == 0
    process.stderr.close()


def test_commands_come_in_order_and_wake_a_sleeping_child(supervisor):
    process = supervisor.start_child()

    verbs = [f"verb{i}" for i in range(50)]
    supervisor.sock.sendall(b"".join(encode(Command(verb=verb)) for verb in verbs))

    assert [supervisor.receive().text for _ in verbs] == verbs
    supervisor.sock.sendall(encode(Command(verb="shutdown")))
    assert process.wait(60) == 0
    process.stderr.close()


def test_a_busy_child_ends_when_its_supervisor_is_lost(supervisor):
    process = supervisor.start_child()
    supervisor.sock.sendall(encode(Command(verb="busy")))
    assert supervisor.receive().facts == {"busy": True}

    supervisor.sock.close()

    assert process.wait(60) == 1
    assert b"the supervisor is gone" in process.stderr.read()
    process.stderr.close()


def test_a_supervisor_that_sends_garbage_ends_the_child(supervisor):
    process = supervisor.start_child()

    supervisor.sock.sendall(b"\x01\x00\x00\x00\xc1")

    assert process.wait(60) == 1
    process.stderr.close()


def test_a_ping_is_answered_while_the_child_is_busy(supervisor):
    process = supervisor.start_child()
    supervisor.sock.sendall(encode(Command(verb="busy")))
    supervisor.receive()

    supervisor.sock.sendall(encode(Ping(payload=9)))

    assert supervisor.receive() == Pong(payload=9)
    supervisor.sock.close()
    process.wait(60)
    process.stderr.close()


def test_a_child_of_another_host_ends_when_pings_cease(tmp_path):
    supervisor = Supervisor("tcp:127.0.0.1:0")
    process = supervisor.start_child(ping_timeout_s=1.0)

    # No ping is expected before the first ping, because models take time to load.
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    supervisor.sock.sendall(encode(Ping()))

    assert process.wait(60) == 1
    assert b"the supervisor is gone (not heard of for 1 s)" in process.stderr.read()
    process.stderr.close()
    supervisor.sock.close()
    supervisor.listener.close()


def test_a_supervisor_that_closes_the_connection_at_once_is_an_error_with_a_remedy(tmp_path):
    supervisor = Supervisor(f"unix:{tmp_path}/s.sock")
    answerer = _answer_with(supervisor, b"")

    with pytest.raises(ProtocolError, match="wrong token"):
        SupervisorLink.connect(supervisor.env, "rank")
    answerer.join()
    supervisor.listener.close()


def test_a_child_sends_nothing_to_a_listener_without_the_token():
    supervisor = Supervisor("tcp:127.0.0.1:0")
    supervisor.token = b"guessed"

    def listen() -> None:
        with pytest.raises(ProtocolError, match="the peer does not know the token"):
            supervisor.accept()
        # The answer of a listener without the token.
        supervisor.sock.sendall(bytes(32))
        assert supervisor.sock.recv(1) == b""

    with ThreadPoolExecutor() as pool:
        listening = pool.submit(listen)
        with pytest.raises(ProtocolError, match="does not know the token of this run"):
            SupervisorLink.connect(supervisor.env, "rank")
        listening.result()
    supervisor.sock.close()
    supervisor.listener.close()


def test_a_child_whose_loop_has_hung_answers_no_ping(supervisor):
    process = supervisor.start_child()
    supervisor.sock.sendall(encode(Command(verb="hang")))
    assert supervisor.receive().text == "hangs"

    supervisor.sock.sendall(encode(Ping(payload=9)))
    supervisor.sock.sendall(encode(Command(verb="other")))

    assert supervisor.receive().text == "other"
    supervisor.sock.close()
    process.wait(60)
    process.stderr.close()


def test_a_supervisor_of_another_version_is_refused(tmp_path):
    supervisor = Supervisor(f"unix:{tmp_path}/s.sock")
    answerer = _answer_with(supervisor, encode(ChildConfig(protocol_version=999)))

    with pytest.raises(ProtocolError, match="one installation"):
        SupervisorLink.connect(supervisor.env, "rank")
    answerer.join()
    supervisor.listener.close()


def _answer_with(supervisor: Supervisor, answer: bytes):
    """A thread that accepts one child, reads its greeting and answers once."""
    import threading

    def serve() -> None:
        supervisor.accept()
        supervisor.receive()
        supervisor.sock.sendall(answer)
        supervisor.sock.shutdown(socket.SHUT_RDWR)
        supervisor.sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread
