"""An engine without a model: every running request gets tokens each step, at a steady pace.

`null_server.py` starts this engine instead of a rank. The environment variable
NULL_ENGINE_STEP_MS sets the pause between steps in milliseconds. NULL_ENGINE_TOKENS sets the
tokens of a request and step, 1 by default; if the number equals the requested output length,
the engine answers at once.
"""

from __future__ import annotations

import os
import signal
import time
from array import array

from trimaran.comm.env import ChildEnv
from trimaran.comm.messages.messages import (
    Cancel,
    EngineHello,
    FinishReason,
    StatsReport,
    StepOutput,
    Submit,
)
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.supervisor_link import SupervisorLink
from trimaran.worker.config.engine_config import RankConfig
from trimaran.worker.serving.frontend_link import FrontendLinks

VOCAB_SIZE = 4096
FACTS = {
    "max_batch_size": 4096, "max_num_tokens": 8192, "max_seq_len": 65536,
    "max_input_len": 32768, "vocab_size": VOCAB_SIZE, "vocab_size_padded": VOCAB_SIZE,
    "logits_dtype": "float32", "world_size": 1, "tp_size": 1, "pp_size": 1,
    "tokens_per_block": 32, "max_blocks": 1 << 16, "device": "none",
    "start_method": "none", "mpi": "none", "dtype": "none",
}  # fmt: skip


class NullEngine:
    """The requests of all front ends, and their numbers of remaining tokens."""

    def __init__(self, links: FrontendLinks, tokens_a_step: int) -> None:
        self._links = links
        self._tokens_a_step = tokens_a_step
        self._left: dict[int, dict[int, int]] = {}
        self._step = 0

    def take(self) -> None:
        """Receive messages; sleeps while no request runs."""
        for arrival in self._links.poll(is_busy=any(self._left.values())):
            requests = self._left.setdefault(arrival.source, {})
            message = arrival.message
            if message is None:
                del self._left[arrival.source]
                self._links.send_all(StatsReport(values={}))
            elif isinstance(message, Submit):
                requests[message.request_id] = SamplingParams.from_wire(
                    message.sampling
                ).max_tokens
            elif isinstance(message, Cancel):
                for request_id in message.request_ids:
                    requests.pop(request_id, None)

    def step(self) -> None:
        """Send the next tokens to every request."""
        self._step += 1
        for source, requests in self._left.items():
            if requests:
                self._links.send(source, self._output(requests))

    def _output(self, requests: dict[int, int]) -> StepOutput:
        ids = array("Q", requests)
        counts, reasons = array("H"), bytearray(len(ids))
        tokens = array("i")
        for row, request_id in enumerate(ids):
            count = min(self._tokens_a_step, requests[request_id])
            counts.append(count)
            requests[request_id] -= count
            if requests[request_id] == 0:
                reasons[row] = FinishReason.LENGTH
                del requests[request_id]
            # Ids of ordinary tokens, different in each step and for each request.
            first = 7 * self._step + 13 * request_id
            tokens.extend(300 + (first + 17 * place) % 3700 for place in range(count))
        return StepOutput(
            step=self._step,
            request_ids=ids.tobytes(),
            sequence_indices=bytes(2 * len(ids)),
            num_tokens=counts.tobytes(),
            finish_reasons=bytes(reasons),
            token_ids=tokens.tobytes(),
        )


def main() -> None:
    """Serve until the supervisor's shutdown command."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    env = ChildEnv.from_environ()
    link, wire = SupervisorLink.connect(env, "rank")
    config = RankConfig.from_wire(wire)
    hello = EngineHello(
        token=env.token,
        model=config.engine.model,
        group=config.group,
        incarnation=config.incarnation,
        facts=FACTS,
    )
    links = FrontendLinks(config.frontends, hello, link.fileno())
    link.state("ready", facts={"device": "none"})
    engine = NullEngine(links, int(os.environ.get("NULL_ENGINE_TOKENS", "1")))
    pause_s = float(os.environ["NULL_ENGINE_STEP_MS"]) / 1000
    due = time.monotonic()
    while all(command.verb != "shutdown" for command in link.commands()):
        engine.take()
        now = time.monotonic()
        if now < due:
            time.sleep(min(due - now, 0.001))
        else:
            engine.step()
            # A late step is not made up for.
            due = max(due + pause_s, now)
    links.close()
    link.close()


if __name__ == "__main__":
    main()
