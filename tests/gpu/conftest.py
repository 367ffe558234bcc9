"""A small Llama for the tests that compare a GPU with the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

RANKS = Path(__file__).with_name("ranks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need several ranks run only if the command names their folder."""
    named = [Path(arg.partition("::")[0]).resolve() for arg in config.args]
    is_named = any(path == RANKS or RANKS in path.parents for path in named)
    return True if collection_path == RANKS and not is_named else None


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A Hugging Face folder of two random layers, of 150 ids and 64 dims."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=150,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)
