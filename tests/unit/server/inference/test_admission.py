"""Waiters for the end of running requests leave the event loop to these requests."""

from __future__ import annotations

import asyncio

import pytest

from trimaran.comm.errors import RequestError
from trimaran.server.inference.admission import Admission


async def ends_of(num_requests: int) -> list[str]:
    """The events while requests end one after another, after one earlier end."""
    admission, seen = Admission(), []
    with admission.admit():
        pass

    async def request(number: int) -> None:
        with admission.admit():
            for _ in range(number):
                await asyncio.sleep(0)
        seen.append(f"request {number} ended")

    running = [asyncio.ensure_future(request(n)) for n in range(1, num_requests + 1)]
    await asyncio.sleep(0)
    admission.start_draining()
    with pytest.raises(RequestError, match="Server is stopping"), admission.admit():
        pass
    await admission.wait_idle()
    seen.append(f"{admission.num_running} run")
    await asyncio.gather(*running)
    return seen


@pytest.mark.timeout(20)
def test_a_drain_ends_with_the_last_request():
    seen = asyncio.run(ends_of(3))

    assert seen == [*(f"request {n} ended" for n in (1, 2, 3)), "0 run"]
