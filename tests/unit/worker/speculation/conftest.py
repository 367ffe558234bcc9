"""A target, and a folder of each kind of network that drafts for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.speculation.head_reference import (
    random_eagle,
    random_medusa,
    random_redrafter,
)

LAYERS = 6
NUM_HEADS = 4


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    """A Llama of six layers, since EAGLE-3 heads take the inputs of three."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder):
    """The target in transformers."""
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def networks(target, target_folder, tmp_path_factory):
    """The folder of each kind of network."""
    root = tmp_path_factory.mktemp("networks")
    # As a draft model: the target with other weights in its last layers.
    other = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight.add_(torch.randn_like(other.lm_head.weight) * 0.05)
    other.save_pretrained(root / "draft_model")
    return {
        "eagle": random_eagle(root / "eagle", target.config, draft_vocab=40),
        "medusa": random_medusa(root / "medusa", target.config, num_heads=NUM_HEADS),
        "redrafter": random_redrafter(
            root / "redrafter", target.config, exit_dim=40, is_recurrent=True
        ),
        "draft_model": root / "draft_model",
    }
