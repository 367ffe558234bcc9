"""The tensors of a request are freed when the request ends, and not when the collector comes:
several prompt tables of tens of megabytes would take the memory of a front end."""

import asyncio
import gc
import weakref
from contextlib import aclosing

import numpy as np
import pytest

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import RequestFailed

TEXT = {"text_input": "A house", "max_tokens": 3, "stream": True}
IDS = {
    "input_ids": [1, 2], "input_lengths": 2, "request_output_len": 3, "streaming": True,
}  # fmt: skip


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def _read(responses):
    """Read to the end. Returns what ended the request: an exception would keep its frames."""
    try:
        async with aclosing(responses):
            async for _ in responses:
                pass
    except (RequestError, asyncio.CancelledError) as error:
        return type(error).__name__
    return "complete"


@pytest.mark.parametrize("end", ["complete", "RequestError", "CancelledError"])
@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
async def test_a_prompt_table_is_freed_at_the_end_of_its_request(
    serve, no_collector, name, end
):
    async with serve() as served:
        engine = await served.dial(served.answer(" one two three"))
        engine.gate.clear()
        table = np.ones((1, 3, 8), np.float16)
        freed = weakref.ref(table)
        inputs = IDS if name == "tensorrt_llm" else TEXT
        responses = served.stream(name, prompt_embedding_table=table, **inputs)
        del table
        task = asyncio.ensure_future(_read(responses))
        del responses
        await engine.until(lambda: engine.submits)
        engine.step()
        if end == "complete":
            engine.gate.set()
        elif end == "RequestError":
            request_id = engine.submits[0].request_id
            engine.send(RequestFailed(request_id=request_id, kind="INTERNAL", text="broken"))
        else:
            task.cancel()
        assert await task == end
        assert freed() is None
