"""The engine on a GPU: the CPU's tokens, the same ones overlapped, and no hidden wait."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm.collectives import SingleRankGroup
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.messages import StepOutput, Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.candidates import largest
from trimaran.worker.config import CacheConfig, EngineConfig, RankConfig, SchedulerConfig
from trimaran.worker.engine import Engine
from trimaran.worker.noise import hash_bits, noise_keys

pytestmark = pytest.mark.gpu

VOCAB = 150
PROMPTS = [
    np.random.default_rng(length).integers(0, VOCAB, length) for length in (1, 16, 40, 90)
]
SAMPLINGS = (
    {},
    {"top_k": 20, "seed": 3},
    {"top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"top_p": 1.0, "seed": 5, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"no_repeat_ngram_size": 2, "return_log_probs": True},
    {"beam_width": 3, "num_return_sequences": 3, "end_id": 7, "temperature": 1.5},
    {"beam_width": 2, "num_return_sequences": 2, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def make_engine(folder, device, depth, cuda_graphs=True, prompt_graph_tokens=0, **cache):
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device=device,
        dtype="float32",
        cuda_graphs=cuda_graphs,
        prompt_graph_tokens=prompt_graph_tokens,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=48,
            max_num_seqs=8,
            max_seq_len=128,
            max_input_len=127,
            max_beam_width=3,
            policy="max_utilization",
            depth=depth,
        ),
        cache=CacheConfig(tokens_per_block=16, **cache),
    )
    rank = RankConfig(engine=config, group="test")
    engine = Engine(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())
    engine.load()
    return engine


def serve(engine):
    """Outputs of all prompts under all samplings, by request id."""
    count = 0
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
            params = SamplingParams(max_tokens=12, **sampling).to_wire()
            ids = pack_ids(prompt)
            engine.submit(
                0, Submit(request_id=count, model="m", prompt_ids=ids, sampling=params)
            )
            count += 1
    outputs = {number: [] for number in range(count)}
    while engine.has_work:
        for _, message in engine.step().messages:
            assert isinstance(message, StepOutput)
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            request_ids = np.frombuffer(message.request_ids, dtype=np.uint64)
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16)
            for request_id, num_tokens in zip(request_ids.tolist(), counts, strict=True):
                outputs[request_id] += [next(ids) for _ in range(num_tokens)]
            for row, extras in message.extras.items():
                if "beams" in extras:
                    outputs[int(request_ids[row])] = extras["beams"]["ids"]
    return outputs


@pytest.fixture(scope="module")
def expected(folder):
    return serve(make_engine(folder, "cpu", 1, max_tokens=512))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_tokens_in_float32_are_those_of_the_cpu(folder, expected, depth, cuda_graphs):
    engine = make_engine(folder, "cuda", depth, cuda_graphs, max_tokens=240)

    assert engine.facts()["cuda_graphs"] == (4 if cuda_graphs else 0)
    assert serve(engine) == expected


@pytest.mark.parametrize("most", [40, 48])
def test_tokens_of_steps_with_prompts_in_graphs_are_those_of_the_cpu(folder, expected, most):
    engine = make_engine(folder, "cuda", 2, prompt_graph_tokens=most, max_tokens=240)

    assert serve(engine) == expected


@pytest.mark.parametrize("prompt_graph_tokens", [0, 48])
def test_a_step_makes_no_hidden_wait_for_the_device(folder, prompt_graph_tokens):
    engine = make_engine(
        folder, "cuda", 2, prompt_graph_tokens=prompt_graph_tokens, max_tokens=512
    )
    serve(engine)

    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        serve(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_cache_takes_its_share_of_the_free_memory(folder):
    engine = make_engine(folder, "cuda", 2)

    # All rows at full length: there is memory for far more.
    assert engine.facts()["max_blocks"] == 8 * 128 // 16
    assert engine.facts()["depth"] == 2
    assert engine.stats()["gpu_memory_bytes"] > 0
    assert engine.stats()["pinned_memory_bytes"] > 0


def test_noise_bits_and_candidate_order_are_those_of_the_cpu():
    keys = torch.from_numpy(noise_keys(*(np.arange(5, dtype=np.uint64) + n for n in range(3))))
    ids = torch.arange(100_000)[None]
    assert torch.equal(hash_bits(keys, ids), hash_bits(keys.cuda(), ids.cuda()).cpu())

    logits = torch.randint(-3, 3, (5, 1000)).float()
    for count in (1, 50, 1000):
        assert torch.equal(largest(logits, count)[1], largest(logits.cuda(), count)[1].cpu())


@pytest.mark.parametrize(
    "cache",
    [{"attention_windows": (20,), "num_sinks": 3}, {"attention_windows": (9, 1000)}],
    ids=["sinks", "a layer"],
)
def test_windows_give_the_cpus_tokens(folder, cache):
    cache = {"max_tokens": 512, **cache}
    expected = serve(make_engine(folder, "cpu", 1, **cache))

    assert serve(make_engine(folder, "cuda", 2, **cache)) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_come_back_from_the_host_give_the_same_tokens(folder, expected, depth):
    engine = make_engine(folder, "cuda", depth, max_tokens=160, host_bytes=1 << 20)
    host = engine.scheduler.cache.hosts[0]

    for _ in range(3):
        assert serve(engine) == expected

    assert host.num_loaded > 0
    assert engine.scheduler.cache.num_free == engine.scheduler.cache.num_blocks
    engine.shutdown()
