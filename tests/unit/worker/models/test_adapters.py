"""Adapters of every architecture: transformers' logits with the same adapter merged in."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.worker.lora.layout import AdapterFormatError, AdapterLayout
from trimaran.worker.lora.peft import PeftAdapter
from trimaran.worker.lora.store import HostSlots

CONFIGS = {
    "llama": models.llama_config(),
    "gpt2": models.gpt2_config(),
    **models.dense_configs(),
    **models.parallel_configs(),
    "deepseek2-lite": models.latent_configs()["deepseek2-lite"],
}
RANK, ALPHA = 4, 8.0
FUSED = "query_key_value"
"""A part whose rows have another order in every architecture: such adapters are refused."""
NOT_ADAPTED = (
    ".q_proj",
    ".kv_a_proj_with_mqa",
    ".kv_b_proj",
    ".gate_proj",
    ".up_proj",
    ".down_proj",
)
"""A part of DeepSeek, which takes adapters of its output projection alone."""


def adapted(theirs, folder, *, with_fused):
    """The model with a random adapter merged in, which is also written as PEFT does."""
    merged, tensors = copy.deepcopy(theirs), {}
    generator = torch.Generator().manual_seed(1)
    for name, linear in merged.named_modules():
        is_linear = isinstance(linear, torch.nn.Linear | Conv1D) and any(
            map(str.isdecimal, name)
        )
        if not is_linear or (name.endswith(FUSED) and not with_fused):
            continue
        if hasattr(theirs.config, "kv_lora_rank") and name.endswith(NOT_ADAPTED):
            continue
        weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
        outputs, inputs = weight.shape
        a = torch.randn(RANK, inputs, generator=generator) / 8
        b = torch.randn(outputs, RANK, generator=generator) / 8
        weight.data += ALPHA / RANK * (b @ a)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


@pytest.mark.matrix(keep=15)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_merged_weights(name, tmp_path):
    theirs = models.save_huggingface(tmp_path / "model", CONFIGS[name])
    merged = adapted(theirs, tmp_path / "adapter", with_fused=False)
    ours = models.load_ours(tmp_path / "model")
    layout, slots = AdapterLayout(ours), HostSlots(ours.context.ops, ours.adapters)
    adapter = PeftAdapter(tmp_path / "adapter")
    adapter.check(layout, RANK)
    size = layout.size_of(adapter.ranks)
    slots.load(0, 0, layout.pack(adapter.matrices(), size, torch.float32, is_transposed=False))
    for linear, targets in layout.linears:
        slots.attach(linear, targets)
    (prompt,) = models.prompts(30)

    plain = PagedRun(ours, 1).logits({0: prompt})
    slots.begin(np.zeros(len(prompt), dtype=np.int32), 0)
    ours.adapters.is_active = ours.adapters.has_tokens = True
    logits = PagedRun(ours, 1).logits({0: prompt})

    with torch.inference_mode():
        expected = merged(torch.tensor([prompt])).logits[0]
    assert (plain - expected).abs().max() > 0.05
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3)


def test_a_module_with_another_row_order_is_refused_by_name(tmp_path):
    theirs = models.save_huggingface(tmp_path / "model", CONFIGS["neox"])
    adapted(theirs, tmp_path / "adapter", with_fused=True)

    with pytest.raises(AdapterFormatError, match=r"query_key_value', which is none of"):
        PeftAdapter(tmp_path / "adapter")
