"""Models with a first-layer table have the same hidden states as models without."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.kernels.torch_ops import TorchOps
from trimaran.worker.models.first_layer_table import make_first_layer_table

CONFIGS = {
    "llama": models.llama_config(),
    "llama-biases": models.llama_config(attention_bias=True),
    "llama-tied": models.llama_config(tie_word_embeddings=True),
    **models.dense_configs(),
    **models.expert_configs(),
}
OTHERS = {
    "gpt2": models.gpt2_config(),
    **models.latent_configs(),
    **models.parallel_configs(),
}


def load_pair(folder, config):
    """A model that computes its first product, and a model that looks up the product."""
    models.save_huggingface(folder, config)
    made, looked_up = (models.load_ours(folder, ops=TorchOps()) for _ in range(2))
    make_first_layer_table(looked_up, 64)
    return made, looked_up


@pytest.mark.matrix(keep=10)
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_hidden_states_with_the_first_layer_table_equal_those_with_the_product(name, tmp_path):
    made, looked_up = load_pair(tmp_path, CONFIGS[name])
    first, second = models.prompts(30, 9)
    steps = [{0: first}, {0: [7], 1: second}, {0: [3], 1: [149]}]

    assert looked_up.first_layer_table is not None
    assert len(looked_up.first_layer_table) == 150
    assert looked_up.backends()["first_product"] == "looked up"
    assert made.backends()["first_product"] == "computed"
    runs = [PagedRun(model, 2) for model in (made, looked_up)]
    for chunks in steps:
        expected, found = (run.hidden(chunks) for run in runs)
        # The table's batch has more rows than the step, and torch may add up in another order.
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_families_with_another_first_layer_have_no_table(name, tmp_path):
    _, model = load_pair(tmp_path, OTHERS[name])

    assert model.first_projection() is None
    assert model.first_layer_table is None


@torch.inference_mode()
def test_the_table_saves_one_product_unless_a_step_has_given_vectors_or_adapters(tmp_path):
    made, looked_up = load_pair(tmp_path, CONFIGS["llama"])
    (prompt,) = models.prompts(30)

    def operations(model, **how):
        with FlopCounterMode(display=False) as counter:
            PagedRun(model, 1).hidden({0: prompt}, **how)
        return counter.get_total_flops()

    whole = operations(made)
    assert whole - operations(looked_up) == 2 * 30 * 64 * (8 + 4 + 4) * 16
    vectors = looked_up.embed_tokens.forward(torch.tensor(prompt))
    assert operations(looked_up, hidden=vectors) == whole
    looked_up.adapters.is_active = True
    assert operations(looked_up) == whole


@torch.inference_mode()
def test_given_vectors_are_not_replaced_by_rows_of_the_table(tmp_path):
    made, looked_up = load_pair(tmp_path, CONFIGS["llama"])
    (prompt,) = models.prompts(30)
    vectors = torch.randn(30, 64, generator=torch.Generator().manual_seed(3))

    expected, found = (
        PagedRun(model, 1).hidden({0: prompt}, hidden=vectors.clone())
        for model in (made, looked_up)
    )

    assert torch.equal(found, expected)
    assert not torch.allclose(found, PagedRun(made, 1).hidden({0: prompt}), atol=1e-3)
