"""Tokens of each expert, counted while a model runs."""

from __future__ import annotations

import numpy as np

from tests.unit.models import models
from trimaran.worker.expert_loads import ExpertLoads

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

    models.PagedRun(ours, 1).logits({0: prompt})
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


def test_a_model_without_experts_counts_nothing(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())

    assert ExpertLoads.of(models.load_ours(tmp_path), None) is None
