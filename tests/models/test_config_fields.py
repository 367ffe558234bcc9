"""Keys of config.json that few checkpoints have mean what transformers takes them to mean."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from tests.models.families import family_configs
from tests.models.field_cases import SERVED
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.worker.config.pretrained_families import FAMILIES

CONFIGS = family_configs()
ARCHITECTURES = {family.model_type: name for name, family in reversed(FAMILIES.items())}
NUM_TOKENS = 6


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in SERVED.items() for key in keys]
)
def test_a_key_means_what_it_does_to_transformers(name, key, tmp_path):
    values = {**CONFIGS[name].to_dict(), **SERVED[name][key]}
    # Transformers derives omitted keys from other keys, but not null values.
    values = {
        name: value
        for name, value in values.items()
        if name not in ("layer_types", "rope_parameters") or value is not None
    }
    values["architectures"] = [ARCHITECTURES[values["model_type"]]]
    config = AutoConfig.for_model(**json.loads(json.dumps(values)))
    models.save_huggingface(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    theirs = models.load_huggingface(tmp_path, config)
    (prompt,) = models.prompts(50)

    ours = models.load_ours(tmp_path, max_seq_len=64)

    logits = PagedRun(ours, 1).logits({0: prompt})
    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=1e-4)
    outputs = PagedRun(ours, 1).greedy([prompt], NUM_TOKENS)
    assert outputs == models.reference_greedy(theirs, [prompt], NUM_TOKENS)
