"""Processor time of the front end's engine client: a request submitted, and a token received.

    .venv/bin/python benchmarks/engine_client.py

Steps come as the bytes that an engine sends, one a decoded step of all requests, and every
chunk is taken at once; no socket and no event loop are in the figures. Best of several runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from array import array

import numpy as np

from trimaran.comm.messages.messages import (
    EngineHello,
    FinishReason,
    FrameBuffer,
    Message,
    StepOutput,
    encode,
)
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.config import FrontendConfig
from trimaran.server.engines.client import EngineClient
from trimaran.server.engines.link import EngineLink
from trimaran.server.engines.live_request import LiveRequest
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.metrics.metrics import Metrics

NUM_PROMPT, NUM_STEPS = 1000, 400
FACTS = {"vocab_size": 32000, "tokens_per_block": 32, "max_blocks": 8192, "reuses_blocks": True}


class Encoder(EngineLink):
    """A connection that encodes outgoing messages and drops them."""

    def send(self, message: Message) -> None:
        """Encode a message."""
        encode(message)


def build(num_groups: int) -> tuple[EngineClient, ModelEngines, dict[str, Encoder]]:
    """A model with this many groups, all up."""
    client = EngineClient(FrontendConfig(model_repository=""), Metrics())
    engines = client.add_model("m", "1", 1, [f"g{index}" for index in range(num_groups)])
    links = {}
    for name in engines.groups:
        links[name] = Encoder(client, "")
        links[name].hello = EngineHello(model="m", group=name, facts=FACTS)
        client.link_ready(links[name], links[name].hello)
    return client, engines, links


def step(requests: list[LiveRequest], number: int) -> bytes:
    """The bytes of one step that gives each request a token."""
    count = len(requests)
    is_last = number == NUM_STEPS - 1
    reason = FinishReason.LENGTH if is_last else FinishReason.NOT_FINISHED
    return encode(
        StepOutput(
            step=number,
            request_ids=array("Q", [request.request_id for request in requests]).tobytes(),
            sequence_indices=bytes(2 * count),
            num_tokens=array("H", [1] * count).tobytes(),
            finish_reasons=bytes([reason]) * count,
            token_ids=array("i", range(count)).tobytes(),
        )
    )


def run(num_requests: int, num_groups: int) -> tuple[float, float]:
    """Microseconds a submitted request and a received token."""
    client, engines, links = build(num_groups)
    draw = np.random.default_rng(5)
    prompts = [pack_ids(draw.integers(0, 32000, NUM_PROMPT)) for _ in range(num_requests)]
    start = time.process_time()
    requests = [
        engines.submit(prompt_ids=ids, sampling={"max_tokens": NUM_STEPS}, streaming=True)
        for ids in prompts
    ]
    submit_s = time.process_time() - start
    owed = {
        name: [request for request in requests if request.submit.group == name]
        for name in links
    }
    steps = [
        (links[name], of_group, step(of_group, number))
        for number in range(NUM_STEPS)
        for name, of_group in owed.items()
        if of_group
    ]
    frames = FrameBuffer()
    start = time.process_time()
    for link, of_group, body in steps:
        for message in frames.feed(body):
            client.message(link, message)
        for request in of_group:
            request.take()
    token_s = time.process_time() - start
    return 1e6 * submit_s / num_requests, 1e6 * token_s / (num_requests * NUM_STEPS)


async def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(f"{'requests':>9} {'groups':>7} {'submit':>8} {'token':>8}   us")
    for num_requests, num_groups in ((1, 1), (16, 1), (64, 1), (64, 2), (64, 8)):
        figures = [run(num_requests, num_groups) for _ in range(args.repeats)]
        submit_us, token_us = (min(column) for column in zip(*figures, strict=True))
        print(f"{num_requests:>9} {num_groups:>7} {submit_us:>8.1f} {token_us:>8.2f}")
    print(f"load average {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
