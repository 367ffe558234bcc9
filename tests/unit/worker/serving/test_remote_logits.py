"""Logits for a front end on another host: too many logits fail no other request."""

from __future__ import annotations

import os
import threading
from collections import defaultdict

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.worker.serving.test_frontend_link import HELLO, Frontend, open_link
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.deadlines import Watchdog
from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import Message, RequestFailed, StepOutput, Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.worker.serving.frontend_link import Arrival, FrontendLinks
from trimaran.worker.serving.outbox import check_remote_logits
from trimaran.worker.serving.serve_loop import LeaderLoop

VOCAB = 1 << 17
BEAMS = {"beam_width": 4, "num_return_sequences": 4, "return_generation_logits": True}


def submit(num_prompt=3, streaming=False, request_id=1, **sampling) -> Submit:
    """A request whose logits take 512 KiB a token in float32."""
    return Submit(
        request_id=request_id,
        model="test",
        prompt_ids=pack_ids([5] * num_prompt),
        sampling=SamplingParams(**sampling).to_wire(),
        streaming=streaming,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A Llama with a large vocabulary and little else."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=None, **sizes, **heads)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", ["unix", "tcp"])
def test_a_beam_search_with_logits_beyond_a_message_is_refused_for_a_remote_front_end(
    make_engine, tmp_path, place
):
    driver = make_engine(max_beam_width=4)
    frontend = Frontend("tcp:127.0.0.1:0" if place == "tcp" else f"unix:{tmp_path}/fe.sock")
    wake_fd = os.eventfd(0)
    links = FrontendLinks((frontend.address,), HELLO, wake_fd)
    source = open_link(frontend, links)
    loop = LeaderLoop(driver.engine, links, LocalControlPlane(), None, None, 1000)

    loop._take(Arrival(source, submit(max_tokens=40, **BEAMS)))

    assert driver.engine.has_work == (place == "unix")
    if place == "tcp":
        failed = frontend.receive()
        assert isinstance(failed, RequestFailed)
        assert "logits of 160 tokens at once are 83886080 bytes" in failed.text
    links.close()
    frontend.close()
    os.close(wake_fd)


@pytest.mark.parametrize(
    ("most", "fields"),
    [
        # Sent at once: a prompt's logits, of all sequences.
        (64, {"return_context_logits": True}),
        (16, {"return_context_logits": True, "num_return_sequences": 4}),
        (128, {"return_context_logits": True, "logits_dtype": "float16"}),
        # Beams share their prompt.
        (64, {**BEAMS, "return_context_logits": True, "max_tokens": 1}),
    ],
)
def test_the_longest_prompt_whose_logits_fit_a_message_is_served(most, fields):
    check_remote_logits(submit(most, **fields), VOCAB, 2048)
    with pytest.raises(RequestError, match="but a front end on another host than rank 0"):
        check_remote_logits(submit(most + 1, **fields), VOCAB, 2048)


def test_logits_sent_step_by_step_have_no_limit_of_tokens():
    for fields in ({"return_generation_logits": True}, {**BEAMS, "streaming": True}):
        check_remote_logits(submit(max_tokens=2000, **fields), VOCAB, 2048)
    # No more tokens are generated than there is room for.
    check_remote_logits(submit(100, max_tokens=2000, **BEAMS), VOCAB, 116)
    with pytest.raises(RequestError, match="logits of 68 tokens"):
        check_remote_logits(submit(100, max_tokens=2000, **BEAMS), VOCAB, 117)


class Told:
    """The messages that a front end received, by request."""

    def __init__(self, messages: list[Message]) -> None:
        self.num_tokens: dict[int, int] = defaultdict(int)
        self.ended: set[int] = set()
        self.logits: dict[int, int] = defaultdict(int)
        self.failed = {m.request_id: m for m in messages if isinstance(m, RequestFailed)}
        for message in messages:
            if isinstance(message, StepOutput):
                self._add(message)

    def _add(self, output: StepOutput) -> None:
        ids = np.frombuffer(output.request_ids, "<u8").tolist()
        counts = np.frombuffer(output.num_tokens, "<u2").tolist()
        assert len(output.token_ids) == 4 * sum(counts)
        for row, request in enumerate(ids):
            self.num_tokens[request] += counts[row]
            if output.finish_reasons[row]:
                self.ended.add(request)
            extras = output.extras.get(row, {})
            for name in ("context_logits", "generation_logits"):
                self.logits[request] += sum(len(item) for item in extras.get(name, ()))


def serve_unread(loop: LeaderLoop, links: FrontendLinks, frontend: Frontend) -> list[Message]:
    """Run all requests while the front end reads nothing; then return its messages."""
    while loop._engine.has_work:
        loop._step()
        links.poll(is_busy=True)
    messages: list[Message] = []

    def read() -> None:
        # The last message is a step of its own.
        while not (
            messages and isinstance(messages[-1], RequestFailed) and not messages[-1].text
        ):
            messages.append(frontend.receive())

    reader = threading.Thread(target=read, daemon=True)
    links.send_all(RequestFailed(request_id=0, kind="INTERNAL", text=""))
    reader.start()
    while reader.is_alive() and links.num_open:
        links.poll(is_busy=True, wait_s=0.001)
    reader.join(60)
    return messages[:-1]


PROMPTS = {"return_context_logits": True, "max_tokens": 1}
STEPS = {"return_generation_logits": True, "num_return_sequences": 2}


@pytest.mark.parametrize("kind", ["prompts", "steps"])
def test_unread_logits_end_no_other_request(make_engine, kind):
    driver = make_engine(max_num_batched_tokens=512, max_num_seqs=32)
    frontend, wake_fd = Frontend("tcp:127.0.0.1:0"), os.eventfd(0)
    links = FrontendLinks((frontend.address,), HELLO, wake_fd)
    source = open_link(frontend, links)
    watchdog = Watchdog(60.0, lambda: None)
    loop = LeaderLoop(driver.engine, links, LocalControlPlane(), None, watchdog, 1_000_000)
    others, asking = range(1, 4), range(4, 16)
    for request in others:
        loop._take(Arrival(source, submit(request_id=request, max_tokens=40)))
    for request in asking:
        fields = {"num_prompt": 16, **PROMPTS}
        if kind == "steps":
            fields = {"max_tokens": request, **STEPS}
        loop._take(Arrival(source, submit(request_id=request, **fields)))

    told = Told(serve_unread(loop, links, frontend))

    assert links.is_open(source)
    assert [told.num_tokens[request] for request in others] == [40] * len(others)
    whole = set(asking) - told.failed.keys()
    assert whole and told.failed and told.failed.keys() < set(asking)
    for request in whole:
        num_rows = 16 if kind == "prompts" else 2 * request
        assert told.logits[request] == num_rows * VOCAB * 4
    assert "bytes unread, and takes logits up to 50331648" in told.failed[15].text
    assert whole < told.ended
    driver.check_idle()
    watchdog.stop()
    links.close()
    frontend.close()
    os.close(wake_fd)
