"""Logits and prompt tables on a GPU: those of the CPU, and no hidden wait for them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm.collectives import SingleRankGroup
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.messages import Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config import CacheConfig, EngineConfig, RankConfig, SchedulerConfig
from trimaran.worker.engine import Engine
from trimaran.worker.prompt_tables import PromptTable

pytestmark = pytest.mark.gpu

VOCAB, HIDDEN = 150, 64
LENGTHS = (1, 16, 40, 90)
_NAMES = ("context_logits", "generation_logits")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
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


def make_engine(folder, device):
    scheduler = SchedulerConfig(
        max_num_batched_tokens=48,
        max_num_seqs=8,
        max_seq_len=128,
        max_input_len=127,
        policy="max_utilization",
        depth=2,
    )
    config = EngineConfig(
        model="test",
        engine_dir=folder,
        device=device,
        dtype="float32",
        scheduler=scheduler,
        cache=CacheConfig(tokens_per_block=16, max_tokens=512),
    )
    rank = RankConfig(engine=config, group="test")
    engine = Engine(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())
    engine.load()
    return engine


def serve(engine):
    """By request: its ids, and both kinds of logits."""
    table = np.random.default_rng(0).normal(0, 0.3, (3, HIDDEN)).astype(np.float32)
    wire = PromptTable("FP32", table.shape, table.tobytes()).to_wire()
    for number, length in enumerate(LENGTHS):
        sampling = SamplingParams(
            max_tokens=8,
            top_k=5,
            seed=number,
            return_context_logits=True,
            return_generation_logits=number != 1,
            logits_dtype="float16" if number == 3 else "float32",
        )
        prompt = np.random.default_rng(length).integers(0, VOCAB + 3, length)
        engine.submit(
            0,
            Submit(
                request_id=number,
                model="m",
                prompt_ids=pack_ids(prompt),
                sampling=sampling.to_wire(),
                embeddings=wire,
                cache_salt=b"table",
            ),
        )
    told = {number: ([], [], []) for number in range(len(LENGTHS))}
    while engine.has_work:
        for _, message in engine.step().messages:
            ids = iter(np.frombuffer(message.token_ids, dtype=np.int32).tolist())
            counts = np.frombuffer(message.num_tokens, dtype=np.uint16)
            requests = np.frombuffer(message.request_ids, dtype=np.uint64).tolist()
            for row, (number, count) in enumerate(zip(requests, counts, strict=True)):
                told[number][0].extend(next(ids) for _ in range(count))
                for place, name in enumerate(_NAMES, 1):
                    told[number][place].extend(message.extras.get(row, {}).get(name, ()))
    return {
        number: (ids, *(_array(number, pieces) for pieces in logits))
        for number, (ids, *logits) in told.items()
    }


def _array(number, pieces):
    dtype = np.float16 if number == 3 else np.float32
    return np.frombuffer(b"".join(pieces), dtype).reshape(-1, VOCAB).astype(np.float32)


def test_logits_and_tables_are_those_of_the_cpu(folder):
    expected = serve(make_engine(folder, "cpu"))
    engine = make_engine(folder, "cuda")
    for _ in range(2):
        found = serve(engine)
        for number, (ids, context, generation) in expected.items():
            assert found[number][0] == ids
            assert context.shape == (LENGTHS[number], VOCAB)
            atol = 2e-2 if number == 3 else 2e-4
            np.testing.assert_allclose(found[number][1], context, atol=atol)
            np.testing.assert_allclose(found[number][2], generation, atol=atol)


def test_logits_make_no_step_wait_for_the_device(folder):
    engine = make_engine(folder, "cuda")
    serve(engine)
    with warnings.catch_warnings():
        # torch says that the mode is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        serve(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
