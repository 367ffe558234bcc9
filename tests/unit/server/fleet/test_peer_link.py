"""Questions and answers between two front ends, over a real socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import Ping, encode
from trimaran.server.fleet.peer_link import PeerLink


class Ends:
    """Both ends of a connection, and whether each end has noticed its loss."""

    def __init__(self):
        self.lost = []
        self.release = asyncio.Event()
        verbs = {"double": self._double, "refuse": self._refuse, "hang": self._hang,
                 "break": self._break}  # fmt: skip
        self.near = PeerLink(verbs, self.lost.append)
        self.far = PeerLink(verbs, self.lost.append)

    async def _double(self, link, arguments):
        return {"number": 2 * arguments["number"]}

    async def _refuse(self, link, arguments):
        raise RequestError("no such model", ErrorKind.NOT_FOUND)

    async def _hang(self, link, arguments):
        await self.release.wait()
        return {}

    async def _break(self, link, arguments):
        raise ZeroDivisionError("by nothing")


@asynccontextmanager
async def connected(tmp_path):
    """Two ends that are connected."""
    ends = Ends()
    loop = asyncio.get_running_loop()
    path = str(tmp_path / "s")
    server = await loop.create_unix_server(lambda: ends.far, path)
    transport, _ = await loop.create_unix_connection(lambda: ends.near, path)
    try:
        yield ends, transport
    finally:
        ends.near.close()
        ends.far.close()
        server.close()


async def test_both_ends_of_a_peer_link_ask_and_answer_concurrently(tmp_path):
    async with connected(tmp_path) as (ends, _):
        slow = asyncio.ensure_future(ends.near.ask("hang"))
        answers = await asyncio.gather(
            ends.near.ask("double", number=2), ends.far.ask("double", number=3)
        )
        ends.release.set()
        assert [answer["number"] for answer in answers] == [4, 6]
        assert await slow == {}


async def test_an_error_keeps_its_kind_and_text(tmp_path):
    async with connected(tmp_path) as (ends, _):
        with pytest.raises(RequestError, match="no such model") as caught:
            await ends.near.ask("refuse")
        assert caught.value.kind is ErrorKind.NOT_FOUND


async def test_a_bug_of_the_other_end_is_an_internal_error_and_leaves_the_connection(tmp_path):
    async with connected(tmp_path) as (ends, _):
        with pytest.raises(RequestError, match="ZeroDivisionError") as caught:
            await ends.near.ask("break")
        assert caught.value.kind is ErrorKind.INTERNAL
        assert (await ends.near.ask("double", number=1))["number"] == 2


async def test_a_question_without_an_answer_ends_at_the_time_limit(tmp_path):
    async with connected(tmp_path) as (ends, _):
        with pytest.raises(RequestError, match="did not answer hang within") as caught:
            await ends.near.ask("hang", 0.05)
        assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_pending_and_later_questions_to_a_lost_peer_fail(tmp_path):
    async with connected(tmp_path) as (ends, transport):
        waiting = asyncio.ensure_future(ends.near.ask("hang"))
        await asyncio.sleep(0.05)
        transport.abort()
        for question in (waiting, ends.near.ask("double", number=1)):
            with pytest.raises(RequestError) as caught:
                await question
            assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert ends.near in ends.lost


async def test_a_peer_that_breaks_the_protocol_is_disconnected(tmp_path):
    async with connected(tmp_path) as (ends, transport):
        transport.write(encode(Ping()))
        for _ in range(100):
            if len(ends.lost) == 2:
                break
            await asyncio.sleep(0.05)
        assert set(ends.lost) == {ends.near, ends.far}
