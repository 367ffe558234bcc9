"""Half-precision engines against transformers: log-probabilities along their own outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.messages.messages import Submit
from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.engine.engine import Engine
from trimaran.worker.execution import model_runner

pytestmark = pytest.mark.gpu

VOCAB = 1000
LENGTHS = (1, 31, 32, 33, 200, 700)
NUM_TOKENS = 24
# Largest difference of a log-probability: some roundings of the hidden state, 8 or 11 bits.
TOLERANCE = {"bfloat16": 0.15, "float16": 0.02}


@pytest.fixture(scope="module", params=[64, 128], ids=["heads of 64", "heads of 128"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=request.param,
        max_position_embeddings=1024,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    reference = LlamaForCausalLM(config)
    reference.save_pretrained(path)
    return str(path), reference.cuda().eval()


def make_engine(folder, dtype, **flags):
    engine_flags = {k: flags.pop(k) for k in ("deterministic", "cuda_graphs") if k in flags}
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device="cuda",
        dtype=dtype,
        scheduler=SchedulerConfig(
            max_num_seqs=16, max_seq_len=1024, max_input_len=1000,
            **{"max_num_batched_tokens": 2048, **flags},
        ),
        cache=CacheConfig(enable_block_reuse=False),
        **engine_flags,
    )  # fmt: skip
    rank = RankConfig(engine=config, group="test")
    return Engine.load(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())


def serve(engine, prompts):
    """Ids and log-probabilities of each prompt's greedy output; all are submitted at once."""
    params = SamplingParams(max_tokens=NUM_TOKENS, return_log_probs=True).to_wire()
    for number, prompt in enumerate(prompts):
        message = Submit(
            request_id=number, model="m", prompt_ids=pack_ids(prompt), sampling=params
        )
        engine.submit(0, message)
    ids = [[] for _ in prompts]
    log_probs = [[] for _ in prompts]
    while engine.has_work:
        for _, message in engine.step().messages:
            tokens = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            requests = np.frombuffer(message.request_ids, dtype=np.uint64).tolist()
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16).tolist()
            for place, (request, count) in enumerate(zip(requests, counts, strict=True)):
                ids[request] += [next(tokens) for _ in range(count)]
                log_probs[request] += message.extras[place]["log_probs"]
    engine.shutdown()
    return ids, log_probs


@pytest.fixture(scope="module")
def prompts():
    return [np.random.default_rng(length).integers(0, VOCAB, length) for length in LENGTHS]


def expected_log_probs(reference, prompt, ids):
    """The same tokens' log-probabilities by transformers, in float32."""
    whole = torch.tensor([[*prompt.tolist(), *ids]], device="cuda")
    with torch.inference_mode():
        logits = reference(whole).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(ids, device="cuda")[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu().numpy()


PATHS = {
    "graphs": {},
    "eager": {"cuda_graphs": False},
    "prompts in chunks": {"max_num_batched_tokens": 96},
    "deterministic": {"deterministic": True},
    "one step in flight": {"depth": 1},
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_log_probabilities_are_those_of_transformers(model, prompts, dtype, path):
    folder, reference = model
    ids, log_probs = serve(make_engine(folder, dtype, **path), prompts)

    for prompt, output, found in zip(prompts, ids, log_probs, strict=True):
        assert len(output) == NUM_TOKENS
        expected = expected_log_probs(reference, prompt, output)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("most_tokens", [96, 2048])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_layer_computes_queries_for_the_ends_of_chunks_alone(
    model, prompts, dtype, most_tokens, monkeypatch
):
    monkeypatch.setattr(model_runner, "_MIN_SPARED", 1)
    folder, reference = model
    path = {"cuda_graphs": False, "max_num_batched_tokens": most_tokens}
    ids, log_probs = serve(make_engine(folder, dtype, **path), prompts)

    for prompt, output, found in zip(prompts, ids, log_probs, strict=True):
        expected = expected_log_probs(reference, prompt, output)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE[dtype], rtol=0)


def assert_same(found, expected):
    """The same ids from the same logits; sums over the vocabulary may be split differently."""
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_deterministic_tokens_depend_on_nothing_but_the_request(model, prompts, dtype):
    folder, _ = model
    together = serve(make_engine(folder, dtype, deterministic=True), prompts)

    eager = make_engine(folder, dtype, deterministic=True, cuda_graphs=False, depth=1)
    assert_same(serve(eager, prompts), together)
    chunked = make_engine(folder, dtype, deterministic=True, max_num_batched_tokens=96)
    assert_same(serve(chunked, prompts), together)
    for prompt, ids, log_probs in zip(prompts, *together, strict=True):
        alone = serve(make_engine(folder, dtype, deterministic=True), [prompt])
        assert_same(alone, ([ids], [log_probs]))
