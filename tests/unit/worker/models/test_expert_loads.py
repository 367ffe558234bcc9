"""Tokens of each expert, counted while a model runs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.driver import Driver
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.experts.loads import ExpertLoads

CONFIGS = models.expert_configs()


def test_every_layer_with_experts_counts_its_own_choices(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["qwen2-moe-normalised-mixed"])
    ours = models.load_ours(tmp_path)
    config = ours.config
    chosen: dict[int, list[int]] = {}
    for number, layer in ours.layers.items():
        if hasattr(layer.mlp, "router"):
            chosen[int(number)] = seen = []
            choose = layer.mlp.router.choose

            def noted(x, choose=choose, seen=seen):
                weights, ids = choose(x)
                seen += ids.flatten().tolist()
                return weights, ids

            layer.mlp.router.choose = noted
    loads = ExpertLoads.of(ours, None)
    (prompt,) = models.prompts(21)

    PagedRun(ours, 1).logits({0: prompt})
    loads.begin()
    report = loads.finish()

    counts = np.frombuffer(report.counts, "<i8").reshape(-1, config.num_experts)
    assert report.layers == sorted(chosen) and len(chosen) < config.num_hidden_layers
    for layer, row in zip(report.layers, counts, strict=True):
        assert row.tolist() == np.bincount(chosen[layer], minlength=len(row)).tolist()
        assert row.sum() == len(prompt) * config.num_experts_per_tok
    loads.reset()
    loads.begin()
    assert not any(loads.finish().counts)


@pytest.mark.parametrize("name", ["mixtral", "deepseek2", "qwen3-moe-mixed-tied"])
def test_prompt_chunks_without_a_sampled_token_skip_the_experts_of_the_last_layer(
    name, tmp_path
):
    configs = {**CONFIGS, **models.latent_configs()}
    models.save_huggingface(tmp_path, configs[name])
    scheduler = SchedulerConfig(
        max_num_batched_tokens=16, max_num_seqs=4, max_seq_len=100, max_input_len=99
    )
    driver = Driver(
        EngineConfig(
            model="test",
            engine_dir=str(tmp_path),
            device="cpu",
            dtype="float32",
            scheduler=scheduler,
            cache=CacheConfig(tokens_per_block=16, max_tokens=256),
        )
    )
    (prompt,) = models.prompts(50)

    driver.submit(prompt, max_tokens=3)
    driver.run()
    report = driver.engine.expert_report()

    counts = np.frombuffer(report.counts, "<i8").reshape(len(report.layers), -1).sum(axis=1)
    num_layers = configs[name].num_hidden_layers
    num_chosen = configs[name].num_experts_per_tok
    # The prompt takes four steps, the last of which samples; two more tokens are decoded.
    for layer, count in zip(report.layers, counts, strict=True):
        is_last = layer == num_layers - 1
        assert count == num_chosen * (3 if is_last else len(prompt) + 2)


def test_a_model_without_experts_counts_nothing(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())

    assert ExpertLoads.of(models.load_ours(tmp_path), None) is None
