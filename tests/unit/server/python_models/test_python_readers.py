"""Clients that read a Python model's stream late, or never."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from trimaran.comm.errors import ErrorKind, RequestError

REPEATER = Path(__file__).parent / "user_models" / "repeater"


@pytest.fixture
def serve_repeater(serve, tmp_path):
    """Like ``serve``, with a model that repeats numbers."""

    @asynccontextmanager
    async def start():
        async with serve():
            pass
        shutil.copytree(REPEATER, tmp_path / "models" / "repeater")
        async with serve(repository=tmp_path / "models") as served:
            yield served

    return start


def values(response):
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def test_a_response_sender_notices_a_cancelled_request(serve_repeater):
    async with serve_repeater() as served:
        async with aclosing(served.stream("repeater", IN=[4, -3])) as responses:
            assert values(await anext(responses)) == {"OUT": [4]}

        async def num_cancelled():
            (response,) = await served.infer("repeater", IN=[])
            return values(response)["CANCELLED"]

        while await num_cancelled() != [1]:
            await asyncio.sleep(0.001)


async def test_unread_responses_end_their_request_and_no_other(serve_repeater, monkeypatch):
    monkeypatch.setattr("trimaran.server.python_models.job.MAX_UNREAD_BYTES", 5 << 10)
    monkeypatch.setattr("trimaran.server.python_models.job.UNREAD_S", 0.5)
    async with serve_repeater() as served:
        async with aclosing(served.stream("repeater", IN=[4] * 40 + [-4, 4, -3])) as responses:
            assert values(await anext(responses)) == {"OUT": [4]}
            # Other requests are answered, one of them with an equally long answer that its
            # client reads.
            read = await served.infer("repeater", IN=[5] * 40 + [-4])
            assert [values(r) for r in read[:-1]] == [{"OUT": [5]}] * 40
            while values((await served.infer("repeater", IN=[]))[0])["CANCELLED"] != [1]:
                await asyncio.sleep(0.001)
            with pytest.raises(RequestError) as caught:
                await anext(responses)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        words = "read nothing for 0.5 s while 39 responses of model 'repeater'"
        assert words in str(caught.value)


async def test_a_reader_that_falls_behind_without_bound_is_ended(serve_repeater, monkeypatch):
    monkeypatch.setattr("trimaran.server.python_models.job.MOST_UNREAD_BYTES", 20 << 10)
    async with serve_repeater() as served:
        read = []
        async with aclosing(served.stream("repeater", IN=[4, -4] + [4] * 500)) as responses:
            with pytest.raises(RequestError, match="the client fell behind while") as caught:
                async for response in responses:
                    read.append(response)
                    await asyncio.sleep(0.02)
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert 0 < len(read) < 500
        assert (await served.infer("repeater", IN=[5]))[0].outputs
