"""The processes that tokenize long texts: order, turns, and processes that end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.server.models.encoded_texts import encode
from trimaran.server.models.tokenizer import Tokenizer
from trimaran.server.models.tokenizer_pool import TokenizerPool, TokenizerSource

LONG = "a word größer 東京 " * 8000
SHORT = "a few words"


@pytest.fixture
def source(tokenizer_folder):
    return TokenizerSource(prepare(tokenizer_folder))


def _processes():
    """The processes of all pools of this process."""
    found = psutil.Process().children()
    return [p for p in found if any("tokenizer_process" in part for part in p.cmdline())]


async def _until(is_true):
    async with asyncio.timeout(100):
        while not is_true():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("add_special_tokens", [True, False])
async def test_ids_of_a_tokenizer_process_equal_those_of_the_tokenizer_in_order(
    source, add_special_tokens
):
    texts = [SHORT, LONG, "", *(f"text {n}" for n in range(6000)), LONG[5:], "end"]
    found = await TokenizerPool(2).encode(source, texts, add_special_tokens)
    right = encode(source.prepared.fast(), texts, add_special_tokens)
    assert found.lengths.tolist() == right.lengths.tolist()
    assert found.ids.tolist() == right.ids.tolist()


async def test_texts_of_a_tokenizer_process_equal_those_of_the_tokenizer_in_order(source):
    fast = source.prepared.fast()
    texts = [SHORT, LONG, "", "end"]
    ids = encode(fast, texts, True)
    pool = TokenizerPool(2)
    assert await pool.decode(source, ids, True) == texts
    with_special = await pool.decode(source, ids, False)
    assert with_special == [
        fast.decode(i.tolist(), skip_special_tokens=False) for i in ids.each()
    ]


async def test_tokenizer_processes_serve_several_tokenizers(tokenizer_folder):
    prepared = prepare(tokenizer_folder)
    pool, sources = TokenizerPool(1), [TokenizerSource(prepared) for _ in range(7)]
    first = await pool.encode(sources[0], [SHORT], True)
    for source in [*sources, *sources]:
        found = await pool.encode(source, [SHORT], True)
        assert found.ids.tolist() == first.ids.tolist()
    assert len(_processes()) == 1


async def _finished_order(pool, source, requests):
    """Names of requests, made at once, in the order of their ends."""
    order = []

    async def run(name, texts):
        await pool.encode(source, texts, True)
        order.append(name)

    await asyncio.gather(*(run(name, texts) for name, texts in requests))
    return order


async def test_short_texts_overtake_waiting_long_texts(source):
    long = [(f"long {n}", [LONG]) for n in range(4)]
    order = await _finished_order(TokenizerPool(1), source, [*long, ("short", [SHORT])])
    assert order == ["long 0", "short", "long 1", "long 2", "long 3"]


async def test_long_texts_leave_one_process_to_short_texts(source):
    pool = TokenizerPool(2)
    await _finished_order(pool, source, [("a", [SHORT]), ("b", [SHORT])])
    long = [(f"long {n}", [LONG * 4]) for n in range(3)]
    order = await _finished_order(pool, source, [*long, ("short", [SHORT])])
    assert order[0] == "short"


async def test_other_texts_run_between_the_texts_of_a_batch(source):
    requests = [("batch", [LONG] * 8), ("one", [LONG])]
    assert await _finished_order(TokenizerPool(1), source, requests) == ["one", "batch"]


async def test_a_cancelled_request_leaves_the_queue(source):
    pool = TokenizerPool(1)
    first = asyncio.ensure_future(pool.encode(source, [LONG], True))
    given_up = asyncio.ensure_future(pool.encode(source, [LONG] * 50, True))
    await asyncio.sleep(0)
    assert pool.num_waiting == 50
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert pool.num_waiting == 0
    await first


async def test_a_request_can_be_repeated_after_the_death_of_its_tokenizer_process(source):
    pool = TokenizerPool(1)
    before = await pool.encode(source, [SHORT], True)
    (process,) = _processes()
    held = asyncio.ensure_future(pool.encode(source, [LONG * 20], True))
    waiting = asyncio.ensure_future(pool.encode(source, [SHORT], True))
    await _until(lambda: process.cpu_times().user > 0)
    process.kill()
    with pytest.raises(RequestError, match="ended; send the request again") as caught:
        await held
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    assert (await waiting).ids.tolist() == before.ids.tolist()
    assert [p.pid for p in _processes()] != [process.pid]


def test_tokenizer_processes_end_with_their_front_end(tokenizer_folder, tmp_path):
    program = f"""
import asyncio, os, psutil
from trimaran.server.models.tokenizer import Tokenizer
tokenizer = Tokenizer({str(tokenizer_folder)!r})
asyncio.run(tokenizer.encode(["a word " * 20000], True))
print(psutil.Process().children()[0].pid, flush=True)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    _, alive = psutil.wait_procs(_of(int(done.stdout)), timeout=100)
    assert not alive


def _of(pid):
    try:
        return [psutil.Process(pid)]
    except psutil.NoSuchProcess:
        return []


async def test_tokenizer_processes_have_a_lower_priority_than_the_front_end(source):
    await TokenizerPool(1).encode(source, [SHORT], True)
    lower = min(os.nice(0) + 1, 19)
    assert all(p.nice() >= lower for p in _processes())


@pytest.mark.parametrize("size", [10, 3000, 200_000])
async def test_ids_of_a_text_are_the_same_from_the_front_end_and_a_process(
    tokenizer_folder, size
):
    tokenizer = Tokenizer(str(tokenizer_folder))
    texts = [LONG[:size], SHORT]
    found = await tokenizer.encode(texts, True)
    right = tokenizer.encode_each(texts, True)
    assert found.ids.tolist() == right.ids.tolist()
    assert await tokenizer.decode_each(found) == texts
