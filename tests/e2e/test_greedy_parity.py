"""Greedy ids through HTTP equal those of transformers on the same weights in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from greedy import wrong_answers
from served import DEMO_MODEL, DEMO_MOE, Served
from waiting import wait_until

NUM_NEW = 24
TOKENS_PER_BLOCK = 16
TOKEN_BUDGET = 128
CASES = (("llama", 1), ("llama", 2), ("llama", 4), ("gpt2", 2))
"""Families and ranks."""

LENGTHS = (1, 2, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK + 1, 2 * TOKENS_PER_BLOCK, 300)


def prompts(vocab_size: int) -> list[list[int]]:
    """64 prompts with lengths at block and budget boundaries, and other lengths."""
    generator = np.random.default_rng(7)
    lengths = [*LENGTHS, *generator.integers(3, 90, 64 - len(LENGTHS))]
    return [generator.integers(3, vocab_size, int(n)).tolist() for n in lengths]


def answers(server: Served, all_prompts: list[list[int]]) -> list[list[int]]:
    """The ids that a server answers prompts with, 16 of them side by side."""

    def ask(prompt: list[int]) -> list[int]:
        body = {
            "input_ids": prompt, "input_lengths": len(prompt), "request_output_len": NUM_NEW,
            "exclude_input_in_output": True,
        }  # fmt: skip
        status, reply = server.post("/v2/models/tensorrt_llm/generate", body)
        assert status == 200, reply
        return list(reply["output_ids"])

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, all_prompts))


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2: learned positions, biases, gelu_new."""
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=1003, n_positions=512, n_embd=96, n_layer=3, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def serving(
    gpt2_folder, build_engine, make_repository, tmp_path_factory
) -> Iterator[Callable[[str, int], tuple[Served, Path]]]:
    """A server and its checkpoint, by family and ranks; all of them start side by side."""
    checkpoints = {"llama": DEMO_MODEL, "gpt2": gpt2_folder}

    def prepare(case: tuple[str, int]) -> Served:
        family, world_size = case
        engine = build_engine(
            checkpoints[family], "--dtype", "float32", "--tp-size", str(world_size),
            "--max-batch-size", "32", "--max-num-tokens", str(TOKEN_BUDGET),
            "--max-input-len", "400", "--tokens-per-block", str(TOKENS_PER_BLOCK),
        )  # fmt: skip
        repository = make_repository(engine, enable_chunked_context="True")
        log = tmp_path_factory.mktemp("log") / "serve.log"
        return Served(repository, world_size=world_size, log_path=log)

    with ThreadPoolExecutor(2) as pool:
        servers = dict(zip(CASES, pool.map(prepare, CASES), strict=True))
    with contextlib.ExitStack() as running:
        for server in servers.values():
            server.start()
            running.callback(server.kill)
        yield lambda family, world_size: (servers[family, world_size], checkpoints[family])


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(("family", "world_size"), CASES)
def test_greedy_ids_equal_transformers(serving, family, world_size):
    server, checkpoint = serving(family, world_size)
    all_prompts = prompts(transformers.AutoConfig.from_pretrained(checkpoint).vocab_size)

    server.wait_ready()
    given = answers(server, all_prompts)

    assert server.stop() == 0
    assert wrong_answers(checkpoint, all_prompts, given, NUM_NEW) == {}


@pytest.mark.timeout(300)
def test_experts_of_an_engine_folder_are_served_and_may_be_rebalanced(
    build_engine, make_repository, tmp_path
):
    engine = build_engine(
        DEMO_MOE, "--dtype", "float32", "--tp-size", "2", "--moe-ep-size", "2",
        "--max-batch-size", "8", "--max-input-len", "400",
        "--tokens-per-block", str(TOKENS_PER_BLOCK),
    )  # fmt: skip
    some = prompts(4096)[:16]
    log = tmp_path / "serve.log"
    flags = ("--moe-rebalance-steps", "7", "--moe-redundant-experts", "2")
    with Served(make_repository(engine), world_size=2, flags=flags, log_path=log) as server:
        assert wrong_answers(DEMO_MOE, some, answers(server, some), NUM_NEW) == {}
        # The last id of an answer is not computed further.
        num_tokens = sum(len(prompt) + NUM_NEW - 1 for prompt in some)
        config = transformers.AutoConfig.from_pretrained(DEMO_MOE)
        tokens = [num_tokens] * config.num_hidden_layers
        # The last layer continues only with tokens after which an id is sampled.
        tokens[-1] = NUM_NEW * len(some)
        expected = {
            str(layer): count * config.num_experts_per_tok for layer, count in enumerate(tokens)
        }
        # An idle engine reports.
        wait_until(
            lambda: tokens_by_layer(server) == expected,
            f"experts that have counted {expected}",
            told=lambda: f"they have counted {tokens_by_layer(server)}",
        )
    assert "moved" in log.read_text()


def tokens_by_layer(server: Served) -> dict[str, float]:
    """The sum of the expert counts of each layer."""
    counts: dict[str, float] = {}
    for labels, count in server.samples("trimaran_expert_tokens"):
        counts[labels["layer"]] = counts.get(labels["layer"], 0) + count
    return counts


@pytest.mark.timeout(300)
def test_experts_of_a_huggingface_folder_are_divided_between_ranks(make_repository, tmp_path):
    some = prompts(4096)[:8]
    flags = ("--moe-tp-size", "2", "--dtype", "float32", "--max-batch-size", "8")
    log = tmp_path / "serve.log"
    repository = make_repository(DEMO_MOE)
    with Served(repository, world_size=2, flags=flags, log_path=log) as server:
        assert wrong_answers(DEMO_MOE, some, answers(server, some), NUM_NEW) == {}
