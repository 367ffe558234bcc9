"""Products that normalise their rows themselves: the models of transformers all the same."""

from __future__ import annotations

import pytest
import torch

from tests.unit.models import models
from tests.unit.models.test_adapters import RANK, adapted
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.lora.layout import AdapterLayout
from trimaran.worker.lora.peft import PeftAdapter
from trimaran.worker.lora.store import HostSlots

MANY = 4
FOLDED = {
    "llama": models.llama_config(),
    "llama-biases": models.llama_config(attention_bias=True, mlp_bias=True),
    "llama-gelu": models.llama_config(hidden_act="gelu"),
    **{name: models.dense_configs()[name] for name in ("mistral", "qwen2", "qwen3", "phi3")},
}
OTHERS = {
    "gemma2": models.dense_configs()["gemma2"],
    "gpt2": models.gpt2_config(),
    "mixtral": models.expert_configs()["mixtral"],
}


class ScalingOps(TorchOps):
    """Torch's operators on a device whose products are faster if they scale more than `MANY`
    rows; it counts the steps' sets of scales."""

    def __init__(self):
        self.num_scaled = 0

    def scales_in_product(self, weight, *, is_gated=False):
        return lambda rows: rows > MANY

    def row_scales(self, x_TD, eps):
        assert len(x_TD) > MANY
        self.num_scaled += 1
        return super().row_scales(x_TD, eps)


@pytest.mark.parametrize("name", FOLDED)
def test_logits_of_many_and_of_few_rows_are_those_of_transformers(name, tmp_path):
    theirs = models.save_huggingface(tmp_path, FOLDED[name])
    ops = ScalingOps()
    ours = models.load_ours(tmp_path, ops=ops)
    (prompt,) = models.prompts(40)
    run = models.PagedRun(ours, 1)

    parts = [run.logits({0: prompt[at:end]}) for at, end in ((0, 20), (20, 23), (23, 40))]

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-5, rtol=1e-4)
    # Two norms a layer, in two of the three steps; those that add up, too, do both at once.
    norms = 1 if "biases" in name else 2 * ours.config.num_hidden_layers
    assert ops.num_scaled == 2 * norms


@pytest.mark.parametrize("name", OTHERS)
def test_norms_whose_outputs_others_take_too_are_no_part_of_a_product(name, tmp_path):
    theirs = models.save_huggingface(tmp_path, OTHERS[name])
    ours = models.load_ours(tmp_path, ops=ScalingOps())
    (prompt,) = models.prompts(40)

    logits = models.PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_hidden_states_of_wanted_tokens_are_theirs_among_all(tmp_path):
    models.save_huggingface(tmp_path, FOLDED["llama"])
    ours = models.load_ours(tmp_path, ops=ScalingOps())
    chunks = dict(enumerate(models.prompts(9, 30)))
    whole, narrow = models.PagedRun(ours, 2), models.PagedRun(ours, 2)
    wanted = torch.tensor([8, 20, 38])

    hidden = narrow.hidden(chunks, wanted=wanted)

    torch.testing.assert_close(hidden, whole.hidden(chunks)[wanted], atol=1e-5, rtol=1e-4)


def test_adapters_add_to_rows_as_the_norm_would_have_left_them(tmp_path):
    theirs = models.save_huggingface(tmp_path / "model", FOLDED["llama"])
    merged = adapted(theirs, tmp_path / "adapter", with_fused=False)
    ours = models.load_ours(tmp_path / "model", ops=ScalingOps())
    layout, slots = AdapterLayout(ours), HostSlots(ours.context.ops, ours.adapters)
    adapter = PeftAdapter(tmp_path / "adapter")
    adapter.check(layout, RANK)
    size = layout.size_of(adapter.ranks)
    slots.load(0, 0, layout.pack(adapter.matrices(), size, torch.float32, is_transposed=False))
    for linear, targets in layout.linears:
        slots.attach(linear, targets)
    (prompt,) = models.prompts(30)
    run = models.PagedRun(ours, 1)

    found = []
    for part in (prompt[:27], prompt[27:]):
        slots.begin(torch.zeros(len(part), dtype=torch.int32).numpy(), len(part))
        ours.adapters.has_tokens = ours.adapters.is_active = True
        found.append(run.logits({0: part}))

    expected = merged(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)


def test_a_weight_that_would_not_be_finite_stays_as_it_is(tmp_path):
    theirs = models.save_huggingface(tmp_path, FOLDED["llama"])
    layer = theirs.model.layers[0]
    layer.self_attn.q_proj.weight.data[0, 0] = 6e4
    layer.input_layernorm.weight.data[0] = 2.0
    theirs.save_pretrained(tmp_path)

    ours = models.load_ours(tmp_path, dtype=torch.float16, ops=ScalingOps()).layers["0"]

    assert ours.attention.qkv_proj.weight[0, 0] == 6e4
    assert ours.attention_norm.weight[0] == 2.0
    assert torch.all(ours.mlp_norm.weight == 1)
