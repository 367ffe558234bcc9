"""Draft tokens change no output on a GPU: in float32, and in bfloat16 where tokens do not
depend on the batch."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

VOCAB = 150
NONE = SpeculationConfig()
ASKED = SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6)
NGRAM = SpeculationConfig(drafter="ngram", max_draft_tokens=5, is_adaptive=False)
SAMPLINGS: tuple[dict, ...] = (
    {"max_tokens": 60},
    {"max_tokens": 40, "top_k": 20, "seed": 3},
    {"max_tokens": 40, "top_p": 0.9, "seed": 4, "min_tokens": 3, "end_id": 7},
    {"max_tokens": 40, "repetition_penalty": 1.2, "bad_words": ((3, 4), (9,))},
    {"max_tokens": 40, "no_repeat_ngram_size": 2, "return_log_probs": True},
)


def make_driver(folder, speculation, **changes):
    values = {"dtype": "float32", "depth": 2, "cuda_graphs": True, "deterministic": False}
    values |= {"max_num_seqs": 8} | changes
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device="cuda",
            dtype=values["dtype"],
            cuda_graphs=values["cuda_graphs"],
            deterministic=values["deterministic"],
            scheduler=SchedulerConfig(
                max_num_batched_tokens=max(96, 8 * values["max_num_seqs"]),
                max_num_seqs=values["max_num_seqs"],
                max_seq_len=128,
                max_input_len=127,
                policy="max_utilization",
                depth=values["depth"],
                speculation=speculation,
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=128 * values["max_num_seqs"]),
        )
    )


def serve(driver, drafts=()):
    """Outputs of all prompts under all samplings."""
    requests = []
    for number in range(20):
        words = np.random.default_rng(number % 4).integers(2, VOCAB, 3)
        prompt = np.random.default_rng(number).choice(words, 30).tolist()
        own = {"draft_token_ids": drafts[number]} if drafts else {}
        requests.append(driver.submit(prompt, **SAMPLINGS[number % len(SAMPLINGS)], **own))
    driver.run(max_steps=100_000)
    return [driver.output(request) for request in requests]


WAYS = {
    "graphs": {},
    "launched": {"cuda_graphs": False},
    "without overlap": {"depth": 1},
    "bfloat16, deterministic": {"dtype": "bfloat16", "deterministic": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_drafts_change_no_output(folder, way):
    plain = serve(make_driver(folder, NONE, **WAYS[way]))

    driver = make_driver(folder, NGRAM, **WAYS[way])
    assert serve(driver) == plain
    assert driver.engine.scheduler.draft_counts.num_accepted

    driver = make_driver(folder, ASKED, **WAYS[way])
    right = [tuple(output[:6]) for output in plain]
    wrong = [(*ids[:2], *((each + 1) % VOCAB for each in ids[2:])) for ids in right]
    for drafts in (right, wrong):
        assert serve(driver, drafts) == plain
    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens


def test_graphs_have_rows_for_drafts(folder):
    driver = make_driver(folder, NGRAM)

    assert driver.engine.runner.graph_size(8 * (1 + NGRAM.max_draft_tokens)) == 48


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """A Hugging Face folder of eight random layers with heads of 128, as the CUDA kernels of
    attention serve them."""
    path = tmp_path_factory.mktemp("wide")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=256, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


class Guesses:
    """Drafts a known output, in which each seventh id is wrong."""

    is_asked = is_spent = False

    def __init__(self, output):
        self._ids = array("i", [(i + (n % 7 == 3)) % VOCAB for n, i in enumerate(output)])

    def propose(self, sequence, most):
        count = sequence.num_output_tokens
        return self._ids[count : count + most]


def test_many_drafts_change_no_output_of_the_decode_kernel(wide_folder):
    """Rows of a sequence read keys that the same step has stored: 240 rows in eight layers."""
    way = {"dtype": "bfloat16", "deterministic": True, "max_num_seqs": 40}
    prompts = [
        np.random.default_rng(number).integers(2, VOCAB, 17).tolist() for number in range(40)
    ]

    def outputs(driver):
        requests = [driver.submit(prompt, max_tokens=100) for prompt in prompts]
        driver.run(max_steps=100_000)
        return [driver.output(request) for request in requests]

    plain = outputs(make_driver(wide_folder, NONE, **way))
    assert len({tuple(output) for output in plain}) > 20
    driver = make_driver(wide_folder, NGRAM, **way)
    known = {tuple(prompt): output for prompt, output in zip(prompts, plain, strict=True)}
    drafts = driver.engine.scheduler.draft_rows
    drafts.make_drafter = lambda request: Guesses(known[tuple(request.prompt_ids)])
    for _ in range(4):
        assert outputs(driver) == plain
    assert drafts.counts.num_accepted > 4 * 40 * 50
