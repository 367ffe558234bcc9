"""A small Llama with clear preferences among ids, and engines that tests run step by step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ProfileConfig,
    SchedulerConfig,
)

VOCAB = 150


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A Hugging Face folder of a random two-layer Llama in float32."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make_engine(model_folder):
    """A function that makes a driver; changes go to the scheduler's or cache's config."""

    def make(
        profile: ProfileConfig | None = None,
        lora: LoraConfig | None = None,
        folder: Path = model_folder,
        **changes,
    ) -> Driver:
        values = {
            "max_num_batched_tokens": 64,
            "max_num_seqs": 16,
            "max_seq_len": 128,
            "max_input_len": 127,
            "policy": "max_utilization",
            "expected_output_tokens": 1,
            "depth": 1,
            "tokens_per_block": 16,
            "max_tokens": 2048,
            **changes,
        }
        scheduler = {f.name for f in dataclasses.fields(SchedulerConfig)} & values.keys()
        cache = {f.name for f in dataclasses.fields(CacheConfig)} & values.keys()
        assert scheduler | cache == values.keys()
        return Driver(
            EngineConfig(
                model="test",
                engine_dir=str(folder),
                dtype="float32",
                device="cpu",
                scheduler=SchedulerConfig(**{name: values[name] for name in scheduler}),
                cache=CacheConfig(**{name: values[name] for name in cache}),
                lora=lora or LoraConfig(),
            ),
            profile,
        )

    return make


@pytest.fixture
def prompt_of():
    """A function that makes a prompt of random ids, the same for the same arguments."""

    def make(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()

    return make
