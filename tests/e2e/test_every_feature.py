"""300 requests over HTTP with features drawn at random, a third of them cut midway."""

from __future__ import annotations

import asyncio
import json
import os
import random

import aiohttp
import pytest
from waiting import wait_until

NUM_REQUESTS, AT_ONCE = 300, 64
MODELS = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
WORDS = "the sea was dark and a man in his house had no time for it".split()


def draw(rng: random.Random, number: int) -> tuple[str, dict]:
    """A model, and a request to the model."""
    model = rng.choice(MODELS)
    is_text = model != "tensorrt_llm"
    body = {"id": f"r{number}", "return_finish_reason": True, "return_num_output_tokens": True}
    if is_text:
        body["text_input"] = " ".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
        body["max_tokens"] = rng.randrange(1, 25)
    else:
        ids = [rng.randrange(2, 4096) for _ in range(rng.randrange(1, 200))]
        body.update(input_ids=ids, input_lengths=len(ids), request_output_len=20)
    names = {
        "stream": "stream",
        "top_k": "top_k",
        "top_p": "top_p",
        "penalty": "length_penalty",
    }
    if not is_text:
        names = {"stream": "streaming", "top_k": "runtime_top_k", "top_p": "runtime_top_p",
                 "penalty": "len_penalty"}  # fmt: skip

    def maybe(chance, **values):
        if rng.random() < chance:
            body.update({names.get(name, name): value for name, value in values.items()})

    maybe(0.6, stream=True)
    maybe(0.3, top_k=rng.choice([1, 5, 300]), temperature=rng.choice([0.0, 0.7, 1.5]))
    maybe(0.3, top_p=0.9, random_seed=number)
    maybe(0.2, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1)
    maybe(0.3, return_log_probs=True)
    maybe(0.2, return_perf_metrics=True)
    maybe(0.03, return_context_logits=True)
    maybe(0.03, return_generation_logits=True)
    maybe(0.3, exclude_input_in_output=True)
    if is_text:
        maybe(0.3, stop_words=[rng.choice(WORDS), "."], bad_words=[rng.choice(WORDS)])
        maybe(0.1, embedding_bias_words=["sea"], embedding_bias_weights=[2.0])
    adapter = rng.choice([{"lora_name": "north"}, {"lora_task_id": 81}])
    maybe(0.3, **adapter)
    maybe(0.15, beam_width=rng.randrange(2, 5), penalty=1.0)
    if "beam_width" not in body:
        maybe(0.2, num_return_sequences=2)
    return model, body


async def run_one(session, url, model, body, rng) -> str:
    """``whole``, ``cut`` or ``stopped``; a whole answer is checked."""
    fate = rng.choice(["whole", "whole", rng.choice(["cut", "stopped"])])
    path = f"{url}/v2/models/{model}"
    ends = []
    async with session.post(f"{path}/generate_stream", json=body) as response:
        assert response.status == 200, await response.text()
        if fate == "stopped":
            stop = {**body, "stop": True}
            async with session.post(f"{path}/generate_stream", json=stop) as stopped:
                await stopped.read()
        async for line in response.content:
            if fate == "cut":
                return fate
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ends += [event["finish_reason"]] if "finish_reason" in event else []
    if fate == "whole":
        assert len(ends) == body.get("num_return_sequences", 1)
        known = {"stop", "length"}
        for end in ends:
            assert known.issuperset(end if isinstance(end, list) else [end])
    return fate


async def run_all(url: str) -> list[str]:
    rng = random.Random(5)
    gate = asyncio.Semaphore(AT_ONCE)
    # Events of logits are long lines.
    session = aiohttp.ClientSession(read_bufsize=64 << 20)
    async with session:

        async def one(number: int) -> str:
            async with gate:
                model, body = draw(rng, number)
                return await run_one(session, url, model, body, rng)

        return await asyncio.gather(*map(one, range(NUM_REQUESTS)))


def num_bulk_files(server) -> int:
    """Payloads beside messages that no front end has released, of all processes."""
    count = 0
    for pid in server.record_tree():
        folder = f"/proc/{pid}/fd"
        for name in os.listdir(folder):
            try:
                count += "trimaran-bulk" in os.readlink(f"{folder}/{name}")
            except FileNotFoundError:
                continue
    return count


@pytest.mark.timeout(240)
def test_all_features_together_leave_nothing_behind(decoupled_server):
    url = f"http://127.0.0.1:{decoupled_server.http_port}"
    fates = asyncio.run(run_all(url))

    assert fates.count("whole") > NUM_REQUESTS / 2
    assert min(fates.count("cut"), fates.count("stopped")) > NUM_REQUESTS / 10
    gauges = (
        ("nv_trt_llm_request_metrics", {"request_type": "active"}),
        ("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "used"}),
        ("nv_inference_pending_request_count", {}),
        ("trimaran_lora_adapters", {"type": "used"}),
    )

    def left() -> dict[str, float]:
        return {
            name: decoupled_server.metric(name, model="tensorrt_llm", **labels)
            for name, labels in gauges
        }

    wait_until(lambda: not any(left().values()), "nothing in use", told=lambda: str(left()))
    assert num_bulk_files(decoupled_server) == 0
    counts = [
        decoupled_server.metric("trimaran_pauses", model="tensorrt_llm", type=kind)
        for kind in ("sequences", "tokens")
    ]
    assert (counts[0] > 0) == (counts[1] > 0)
