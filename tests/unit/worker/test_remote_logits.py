"""Logits for a front end on another host: what is too large for a message is refused."""

from __future__ import annotations

import os

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.worker.test_frontend_link import HELLO, Frontend, open_link
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.errors import RequestError
from trimaran.comm.messages import RequestFailed, Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.worker.frontend_link import Arrival, FrontendLinks
from trimaran.worker.remote_logits import check_remote_logits
from trimaran.worker.serve_loop import LeaderLoop

VOCAB = 1 << 17
BEAMS = {"beam_width": 4, "num_return_sequences": 4, "return_generation_logits": True}


def submit(num_prompt=3, streaming=False, **sampling) -> Submit:
    """A request whose logits take 512 KiB a token in float32."""
    return Submit(
        request_id=1,
        model="test",
        prompt_ids=pack_ids([5] * num_prompt),
        sampling=SamplingParams(**sampling).to_wire(),
        streaming=streaming,
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A Llama with many ids and little else."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=None, **sizes, **heads)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", ["unix", "tcp"])
def test_a_search_whose_logits_fit_no_message_is_refused_on_another_host(
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
        # Told at once: a prompt's logits, of all sequences.
        (64, {"return_context_logits": True}),
        (16, {"return_context_logits": True, "num_return_sequences": 4}),
        (128, {"return_context_logits": True, "logits_dtype": "float16"}),
        # Beams share their prompt.
        (64, {**BEAMS, "return_context_logits": True, "max_tokens": 1}),
    ],
)
def test_a_prompt_may_be_as_long_as_its_logits_fit(most, fields):
    check_remote_logits(submit(most, **fields), VOCAB, 2048)
    with pytest.raises(RequestError, match="but a front end on another host than rank 0"):
        check_remote_logits(submit(most + 1, **fields), VOCAB, 2048)


def test_what_is_told_step_by_step_has_no_limit_of_tokens():
    for fields in ({"return_generation_logits": True}, {**BEAMS, "streaming": True}):
        check_remote_logits(submit(max_tokens=2000, **fields), VOCAB, 2048)
    # No more tokens come than there is room for.
    check_remote_logits(submit(100, max_tokens=2000, **BEAMS), VOCAB, 116)
    with pytest.raises(RequestError, match="logits of 68 tokens"):
        check_remote_logits(submit(100, max_tokens=2000, **BEAMS), VOCAB, 117)
