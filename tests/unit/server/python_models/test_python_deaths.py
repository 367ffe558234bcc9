"""Processes of Python models that die, and what comes after them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from trimaran.comm.errors import ErrorKind, RequestError


async def failure_of(work):
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


async def test_a_dead_process_fails_its_requests_and_is_restarted(serve_own):
    async with serve_own("repeater") as served:
        model = served.models["repeater"]
        async with aclosing(served.stream("repeater", IN=[4, -3])) as responses:
            await anext(responses)
            dying = asyncio.ensure_future(failure_of(served.infer("repeater", IN=[-1])))
            error = await failure_of(anext(responses))
        assert error.kind is ErrorKind.UNAVAILABLE
        assert "'repeater_0' ended while it ran the request" in str(error)
        assert (await dying).kind is ErrorKind.UNAVAILABLE
        assert not model.is_ready
        # Waits for the process that is being started.
        assert len(await served.infer("repeater", IN=[4])) == 2
        assert model.is_ready


FORKS = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if request.inputs()[0].as_numpy()[0] == -1:
                if not os.fork():
                    time.sleep(30)
                    os._exit(0)
                os.kill(os.getpid(), 9)
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(flags=final)
"""


async def test_the_end_of_a_process_is_noticed_despite_its_forked_children(serve_own):
    async with serve_own("repeater", repeater=FORKS) as served:
        dying = failure_of(served.infer("repeater", IN=[-1]))
        assert "ended while it ran the request" in str(await asyncio.wait_for(dying, 25))
        # Waits for the process that is being started.
        assert await served.infer("repeater", IN=[4]) == []


SLOW_AGAIN = """
import os, pathlib, time

class TritonPythonModel:
    def initialize(self, args):
        started = pathlib.Path(__file__).with_name("pids")
        with started.open("a") as pids:
            print(os.getpid(), file=pids)
        if len(started.read_text().split()) > 1:
            time.sleep(60)

    def execute(self, requests):
        os.kill(os.getpid(), 9)
"""


async def test_closing_a_model_ends_a_process_in_restart(serve_own, tmp_path):
    async with serve_own("repeater", repeater=SLOW_AGAIN) as served:
        await failure_of(served.infer("repeater", IN=[4]))
        pids = tmp_path / "own" / "repeater" / "1" / "pids"
        while len(started := pids.read_text().split()) < 2:
            await asyncio.sleep(0.01)
    assert not Path(f"/proc/{started[1]}").exists()


async def test_a_process_that_cannot_be_restarted_is_abandoned(serve_own, monkeypatch):
    async with serve_own("repeater") as served:
        monkeypatch.setattr("sys.executable", "/nowhere/python")
        await failure_of(served.infer("repeater", IN=[-1]))
        error = await asyncio.wait_for(failure_of(served.infer("repeater", IN=[4])), 250)
        assert "died too often and was given up" in str(error)
