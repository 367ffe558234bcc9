"""Model families in the engine: chunked, batched, and from the prefix cache."""

from __future__ import annotations

import pytest

from tests.unit.worker.models import models
from trimaran.launcher.cli.main import main
from trimaran.worker.execution.warm_up import load_product_kernels

NUM_TOKENS = 24


CONFIGS = {**models.dense_configs(), **models.latent_configs()}


@pytest.fixture(
    scope="module", params=["mistral", "qwen3", "phi3", "gemma2", "gemma3", "deepseek3"]
)
def checkpoint(request, tmp_path_factory):
    """A Hugging Face folder, and transformers' model of this folder."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = models.save_huggingface(folder, CONFIGS[request.param])
    return folder, theirs


@pytest.fixture
def model_folder(checkpoint, tmp_path):
    """The engine folder built from the Hugging Face folder."""
    output = tmp_path / "engine"
    assert main(["build", "--checkpoint", str(checkpoint[0]), "--output", str(output)]) == 0
    return output


def outputs_of(driver, prompts):
    ids = [driver.submit(prompt, max_tokens=NUM_TOKENS) for prompt in prompts]
    driver.run()
    driver.check_idle()
    return [driver.output(number) for number in ids]


@pytest.mark.matrix(keep=3)
def test_a_built_engine_gives_the_tokens_of_transformers(make_engine, checkpoint):
    driver = make_engine(max_num_batched_tokens=17, tokens_per_block=4)
    prompts = models.prompts(3, 22, 61)

    first, again = outputs_of(driver, prompts), outputs_of(driver, prompts)

    assert first == again == models.reference_greedy(checkpoint[1], prompts, NUM_TOKENS)
    assert driver.engine.scheduler.cache.num_reused_blocks > 0


@pytest.mark.parametrize("checkpoint", ["mistral"], indirect=True)
def test_a_window_of_all_layers_bounds_the_blocks_of_a_sequence(make_engine, checkpoint):
    # 85 tokens in blocks of 4 with 8 blocks; a window of 11 holds 4 blocks beside a chunk.
    driver = make_engine(
        max_num_batched_tokens=8, max_num_seqs=2, tokens_per_block=4, max_tokens=32
    )
    prompts = models.prompts(61)

    outputs = outputs_of(driver, prompts)

    assert outputs == models.reference_greedy(checkpoint[1], prompts, NUM_TOKENS)


@pytest.mark.parametrize("checkpoint", ["gemma3"], indirect=True)
def test_a_narrower_window_of_the_cache_overrides_the_window_of_the_model(make_engine):
    def windows(**changes):
        layers = make_engine(**changes).engine.runner.model.layers.values()
        return [layer.attention.backend.spec.window for layer in layers]

    assert windows() == [9, 9, 0, 9, 9, 0]
    assert windows(attention_windows=(5, 50)) == [5, 9, 5, 9, 5, 50]
    # A window that no sequence exceeds has no effect.
    assert windows(max_seq_len=9, max_input_len=8) == [0] * 6


@pytest.mark.parametrize("checkpoint", ["deepseek3"], indirect=True)
def test_latent_vectors_survive_preemption_and_copies_to_the_host_and_back(
    make_engine, checkpoint
):
    # Three sequences of up to 46 tokens in a cache of 100.
    driver = make_engine(
        max_num_batched_tokens=32, tokens_per_block=4, max_tokens=100, host_bytes=1 << 20
    )
    prompts = models.prompts(20, 18, 22)
    expected = models.reference_greedy(checkpoint[1], prompts, NUM_TOKENS)

    for prompt in prompts:
        driver.submit(prompt, max_tokens=NUM_TOKENS)
    max_paused = 0
    while driver.engine.has_work:
        driver.step()
        max_paused = max(max_paused, driver.engine.scheduler.preemptions.num_waiting)
    for _ in range(2):
        assert outputs_of(driver, prompts) == expected

    host = driver.engine.scheduler.cache.hosts[0]
    assert host.num_stored > 0 and host.num_loaded > 0
    assert max_paused > 0


@pytest.mark.parametrize("checkpoint", ["deepseek3"], indirect=True)
def test_warm_up_steps_run_few_layers_and_leave_nothing(make_engine, checkpoint, monkeypatch):
    driver = make_engine(max_num_batched_tokens=200, max_num_seqs=20, tokens_per_block=4)
    engine, ran = driver.engine, []
    layers = list(engine.runner.model.layers.values())
    for number, layer in enumerate(layers):

        def forward(*inputs, number=number, real=layer.forward):
            ran.append(number)
            return real(*inputs)

        monkeypatch.setattr(layer, "forward", forward)

    load_product_kernels(engine.runner, engine.scheduler.config)

    # The first layer is dense, the other layers have experts, and the last layer may skip
    # tokens.
    assert set(ran) == {0, 1, len(layers) - 1}
    prompts = models.prompts(3, 22, 61)
    expected = models.reference_greedy(checkpoint[1], prompts, NUM_TOKENS)
    assert outputs_of(driver, prompts) == expected
    assert set(ran) == set(range(len(layers)))
