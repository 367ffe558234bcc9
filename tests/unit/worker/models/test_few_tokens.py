"""Steps of few tokens by operators that fuse several others: the logits of plain torch."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, Qwen3MoeConfig

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.kernels.experts.floats import MeasuredExperts
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.tables.grouped_table import GroupedTable
from trimaran.worker.models.deepseek import LatentAttention

DTYPE = torch.float16

_SIZES = {
    "vocab_size": 150, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "moe_intermediate_size": 256,
    "num_experts_per_tok": 2, "initializer_range": 0.1, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "qwen3-moe": Qwen3MoeConfig(**_SIZES, num_key_value_heads=2, head_dim=16, num_experts=6),
    "deepseek2-lite": DeepseekV2Config(
        **_SIZES, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=6, n_shared_experts=2,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


class NotedOps(TritonOps):
    """Notes the operators that took a step."""

    def __init__(self) -> None:
        mixture = MeasuredExperts(torch.device("cpu"), DTYPE, GroupedTable({}))
        super().__init__(experts=mixture)
        self.taken: list[str] = []

    def mixture_parts(self, *arguments, **named):
        return self._noted("mixture", super().mixture_parts(*arguments, **named))

    def decoded_latents(self, *arguments, **named):
        return self._noted("latents", super().decoded_latents(*arguments, **named))

    def _noted(self, name, found):
        self.taken += [name] * (found is not None)
        return found


def logits_of(model, is_joined=False):
    """Logits of a prompt, and of each token behind it."""
    if is_joined:
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.join_products()
    run = PagedRun(model, 1)
    steps = [run.logits({0: ids}) for ids in ([3, 77], [20], [8])]
    return torch.cat(steps).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_decodes_have_the_logits_of_plain_torch(name, tmp_path):
    models.save_huggingface(tmp_path, CONFIGS[name], dtype=DTYPE)
    expected = logits_of(models.load_ours(tmp_path, dtype=DTYPE))
    ops = NotedOps()

    logits = logits_of(models.load_ours(tmp_path, dtype=DTYPE, ops=ops), is_joined=True)

    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=2e-2)
    # Two decodes; the first layer of DeepSeek has no experts, and each has latent vectors.
    is_latent = name == "deepseek2-lite"
    assert ops.taken.count("mixture") == (2 if is_latent else 4)
    assert ops.taken.count("latents") == (4 if is_latent else 0)


def test_joint_products_keep_the_weights_and_the_logits(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek2-lite"])
    apart, joint = (models.load_ours(tmp_path) for _ in range(2))

    logits = logits_of(joint, is_joined=True)

    torch.testing.assert_close(logits, logits_of(apart), atol=2e-5, rtol=1e-4)
    for ours, theirs in zip(joint.parameters(), apart.parameters(), strict=True):
        assert ours.equal(theirs)
    first = joint.layers["0"].attention
    pointers = first.q_proj.weight.data_ptr(), first.down_proj.weight.data_ptr()
    assert pointers[1] - pointers[0] == first.q_proj.weight.nbytes


def test_weights_replaced_after_the_join_are_those_that_multiply(tmp_path):
    models.save_huggingface(tmp_path, CONFIGS["deepseek2-lite"])
    model, changed = (models.load_ours(tmp_path) for _ in range(2))
    logits_of(model, is_joined=True)
    for each in (model, changed):
        weight = each.layers["1"].attention.q_proj.weight
        weight.data = weight.data * 1.5

    torch.testing.assert_close(logits_of(model), logits_of(changed), atol=2e-5, rtol=1e-4)


def test_queries_of_compressed_vectors_and_biases_are_not_joined(tmp_path):
    configs = models.latent_configs()
    for name in ("deepseek2", "deepseek3"):
        folder = tmp_path / name
        models.save_huggingface(folder, configs[name])
        attention = models.load_ours(folder).layers["1"].attention
        assert attention.joinable == ()
