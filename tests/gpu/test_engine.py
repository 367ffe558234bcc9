"""The engine on a GPU: tokens of the CPU with and without overlap, and no hidden
synchronization."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.driver import Driver
from tests.gpu.hidden_waits import no_hidden_waits
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.sampling.candidates import largest
from trimaran.worker.sampling.noise import hash_bits, noise_keys

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


def make_driver(
    folder, device, depth, cuda_graphs=True, prompt_graph_tokens=0, has_table=None, **cache
):
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=folder,
            device=device,
            dtype="float32",
            cuda_graphs=cuda_graphs,
            prompt_graph_tokens=prompt_graph_tokens,
            first_layer_table=has_table,
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
    )


def serve(driver):
    """Outputs of all prompts under all samplings."""
    return driver.serve(PROMPTS, SAMPLINGS)


@pytest.fixture(scope="module")
def expected(folder):
    return serve(make_driver(folder, "cpu", 1, max_tokens=512))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_tokens_in_float32_are_those_of_the_cpu(folder, expected, depth, cuda_graphs):
    driver = make_driver(folder, "cuda", depth, cuda_graphs, max_tokens=240)

    assert driver.engine.facts()["cuda_graphs"] == (4 if cuda_graphs else 0)
    assert serve(driver) == expected


@pytest.mark.parametrize("has_table", [None, False])
def test_tokens_with_and_without_the_first_layer_table_are_those_of_the_cpu(
    folder, expected, has_table
):
    driver = make_driver(folder, "cuda", 2, has_table=has_table, max_tokens=240)

    found = driver.engine.facts()["backends"]["first_product"]
    assert found == ("looked up" if has_table is None else "computed")
    assert serve(driver) == expected


@pytest.mark.parametrize("most", [40, 48])
def test_tokens_of_steps_with_prompts_in_graphs_are_those_of_the_cpu(folder, expected, most):
    driver = make_driver(folder, "cuda", 2, prompt_graph_tokens=most, max_tokens=240)

    assert serve(driver) == expected


@pytest.mark.parametrize("prompt_graph_tokens", [0, 48])
def test_a_step_makes_no_hidden_synchronization_with_the_device(folder, prompt_graph_tokens):
    driver = make_driver(
        folder, "cuda", 2, prompt_graph_tokens=prompt_graph_tokens, max_tokens=512
    )
    serve(driver)

    with no_hidden_waits():
        serve(driver)


def test_the_cache_takes_its_fraction_of_free_memory(folder):
    driver = make_driver(folder, "cuda", 2)

    # All rows at full length: there is memory for far more.
    assert driver.engine.facts()["max_blocks"] == 8 * 128 // 16
    assert driver.engine.facts()["depth"] == 2
    assert driver.engine.stats()["gpu_memory_bytes"] > 0
    assert driver.engine.stats()["pinned_memory_bytes"] > 0


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
def test_windowed_attention_gives_the_tokens_of_the_cpu(folder, cache):
    cache = {"max_tokens": 512, **cache}
    expected = serve(make_driver(folder, "cpu", 1, **cache))

    assert serve(make_driver(folder, "cuda", 2, **cache)) == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("enable_block_reuse", [True, False])
def test_preempted_sequences_rotate_and_keep_their_kv_on_the_host(
    folder, depth, enable_block_reuse
):
    prompts = [np.random.default_rng(seed).integers(0, VOCAB, 7) for seed in range(8)]

    def outputs(driver):
        numbers = [driver.submit(prompt, max_tokens=120) for prompt in prompts]
        driver.run()
        driver.check_idle()
        return [driver.output(number) for number in numbers]

    expected = outputs(make_driver(folder, "cpu", 1, max_tokens=2048))
    driver = make_driver(
        folder, "cuda", depth, max_tokens=480, host_bytes=1 << 20,
        enable_block_reuse=enable_block_reuse,
    )  # fmt: skip
    scheduler = driver.engine.scheduler

    for _ in range(3):
        assert outputs(driver) == expected

    assert scheduler.cache.hosts[0].num_loaded > 0
    assert scheduler.preemptions.num_sequences > 3 * len(prompts)
    driver.engine.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_restored_from_the_host_give_the_same_tokens(folder, expected, depth):
    driver = make_driver(folder, "cuda", depth, max_tokens=176, host_bytes=1 << 20)
    cache = driver.engine.scheduler.cache

    for _ in range(3):
        assert serve(driver) == expected

    assert cache.hosts[0].num_loaded > 0
    assert cache.num_free == cache.num_blocks
    driver.engine.shutdown()
