"""Connections that have not greeted cost little memory, little time, and are few."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import asynccontextmanager
from functools import partial

import pytest

from trimaran.comm.errors import ProtocolError
from trimaran.comm.messages.guarded_frames import MAX_HELLO_BYTES, Gate
from trimaran.comm.messages.messages import ChildHello, ChildState, encode
from trimaran.comm.transport.greeting import DialerGreeting

TOKEN = "secret"


class Listener(asyncio.Protocol):
    """Accepts, and opens a connection at its first message."""

    def __init__(self, gate: Gate, heard: list) -> None:
        self._gate = gate
        self._heard = heard

    def connection_made(self, transport):
        self.frames = self._gate.admit(transport)

    def data_received(self, data):
        try:
            self.frames.feed(data, self._take)
        except ProtocolError as error:
            self.frames.refuse(str(error))

    def connection_lost(self, error):
        self.frames.lost()

    def _take(self, message):
        self.frames.open(max_bytes=1 << 20)
        self._heard.append(message)


@asynccontextmanager
async def listening(*, is_remote: bool, **limits):
    """A listener on loopback: its port, and its received messages."""
    heard: list = []
    gate = Gate("the test", TOKEN, is_remote=is_remote, **limits)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Listener, gate, heard), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], heard
    server.close()


async def dial(port: int):
    return await asyncio.open_connection("127.0.0.1", port)


async def greeted(port: int):
    """A connection on which both ends have proved the token."""
    reader, writer = await dial(port)
    greeting = DialerGreeting(TOKEN.encode())
    while not greeting.is_done:
        writer.write(greeting.feed(await reader.readexactly(greeting.num_missing)))
    return reader, writer


async def closed(reader) -> None:
    """Return once the peer has closed the connection."""
    try:
        await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        pass


async def wait_for(is_so) -> None:
    for _ in range(6000):
        if is_so():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_silent_connection_is_closed_in_time(is_remote, caplog):
    async def scene():
        async with listening(is_remote=is_remote, timeout_s=0.1) as (port, _):
            reader, writer = await dial(port)
            await closed(reader)
            writer.close()

    run(scene())
    assert "closed a connection to the test: no greeting within 0.1 s" in caplog.text


def test_a_connection_with_a_greeting_but_no_hello_is_closed_in_time():
    async def scene():
        async with listening(is_remote=True, timeout_s=0.3) as (port, _):
            reader, writer = await greeted(port)
            await closed(reader)
            writer.close()

    run(scene())


def test_a_connection_may_be_silent_after_its_hello():
    async def scene():
        async with listening(is_remote=True, timeout_s=0.2) as (port, heard):
            _, writer = await greeted(port)
            writer.write(encode(ChildHello()))
            await asyncio.sleep(0.4)
            writer.write(encode(ChildState(state="ready", text="x" * 500_000)))
            await wait_for(lambda: len(heard) == 2)
            writer.close()

    run(scene())


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_long_frame_before_the_hello_is_refused_by_its_length(is_remote, caplog):
    async def scene():
        async with listening(is_remote=is_remote) as (port, _):
            reader, writer = await dial(port)
            # The frame is refused by its length: the announced bytes never arrive.
            writer.write(b"\xff\xff\xff\x7f" + bytes(100))
            await closed(reader)
            writer.close()

    run(scene())
    text = "no greeting" if is_remote else f"over the limit of {MAX_HELLO_BYTES}"
    assert text in caplog.text


def test_a_frame_over_the_limit_after_the_hello_names_the_limit(caplog):
    async def scene():
        async with listening(is_remote=True) as (port, heard):
            reader, writer = await greeted(port)
            writer.write(encode(ChildHello()))
            await wait_for(lambda: heard)
            writer.write((2 << 20).to_bytes(4, "little"))
            await closed(reader)
            writer.close()

    run(scene())
    assert "a frame of 2097152 bytes is over the limit of 1048576" in caplog.text


def test_the_oldest_of_too_many_connections_is_closed_for_a_child():
    async def scene():
        async with listening(is_remote=True, max_ungreeted=5) as (port, heard):
            silent = [await dial(port) for _ in range(20)]
            _, writer = await greeted(port)
            writer.write(encode(ChildHello()))
            await wait_for(lambda: len(heard) == 1)
            await asyncio.gather(*(closed(reader) for reader, _ in silent[:15]))
            for _, each in (*silent, (None, writer)):
                each.close()

    run(scene())


def test_a_thousand_refused_connections_write_a_few_log_lines(caplog):
    async def scene():
        async with listening(is_remote=True) as (port, _):
            for _ in range(1000):
                with socket.create_connection(("127.0.0.1", port)) as sock:
                    sock.sendall(bytes(65))
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert 1 <= len(caplog.records) <= 60
