"""A small Llama with strong opinions, and engines on it that tests drive by hand."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trimaran.comm.collectives import SingleRankGroup
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.messages import FinishReason, StepOutput, Submit, pack_ids
from trimaran.comm.sampling_params import SamplingParams
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ProfileConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.engine import Engine

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


class Driver:
    """An engine and what it has said, by request."""

    def __init__(
        self, config: EngineConfig, profile: ProfileConfig | None = None, ties: tuple = ()
    ) -> None:
        """``ties`` are the engine's layout, control plane, group and links; its own if none."""
        self.engine = Engine(
            RankConfig(engine=config, group="test", profile=profile),
            *(ties or (ParallelLayout(), LocalControlPlane(), SingleRankGroup())),
        )
        self.engine.load()
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[int, int], FinishReason] = {}
        self.extras: dict[tuple[int, int], list[dict]] = defaultdict(list)
        self.num_steps = 0
        self._last_id = 0

    def submit(self, prompt, source="client", output=(), **fields) -> int:
        """Submit one request; ``Submit``'s own fields and sampling's go by name."""
        self._last_id += 1
        own = {f.name for f in dataclasses.fields(Submit)}
        message = Submit(
            request_id=self._last_id,
            model="test",
            prompt_ids=pack_ids(list(prompt)),
            output_ids=pack_ids(list(output)),
            sampling=SamplingParams(
                **{name: value for name, value in fields.items() if name not in own}
            ).to_wire(),
            **{name: value for name, value in fields.items() if name in own},
        )
        self.engine.submit(source, message)
        return self._last_id

    def step(self) -> None:
        """One engine step; what it says is filed."""
        self.num_steps += 1
        for _, message in self.engine.step().messages:
            assert isinstance(message, StepOutput)
            self._file(message)

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is no work."""
        while self.engine.has_work:
            assert self.num_steps < max_steps, "the engine does not come to an end"
            self.step()

    def _file(self, message: StepOutput) -> None:
        ids = np.frombuffer(message.token_ids, dtype=np.int32).tolist()
        counts = np.frombuffer(message.num_tokens, dtype=np.uint16).tolist()
        keys = zip(
            np.frombuffer(message.request_ids, dtype=np.uint64).tolist(),
            np.frombuffer(message.sequence_indices, dtype=np.uint16).tolist(),
            strict=True,
        )
        reasons = np.frombuffer(message.finish_reasons, dtype=np.uint8).tolist()
        start = 0
        for row, (key, count, reason) in enumerate(zip(keys, counts, reasons, strict=True)):
            assert key not in self.reasons, f"{key} said something after its end"
            self.tokens[key] += ids[start : start + count]
            start += count
            if row in message.extras:
                self.extras[key].append(message.extras[row])
            if reason:
                self.reasons[key] = FinishReason(reason)

    def output(self, request_id: int, index: int = 0) -> list[int]:
        """The tokens of one sequence so far."""
        return self.tokens[request_id, index]

    def check_idle(self) -> None:
        """Nothing is left of any request."""
        scheduler = self.engine.scheduler
        cache = scheduler.cache
        assert not scheduler.running and not scheduler.waiting
        cache.check([])
        assert cache.num_free == cache.num_available == cache.num_blocks
        assert len(scheduler.rows.free) == scheduler.config.max_num_seqs
        assert scheduler.num_preempted == 0
        assert not self.engine._requests and not self.engine._in_flight


@pytest.fixture
def make_engine(model_folder):
    """A function that makes a driver; changes go to the scheduler's or cache's config."""

    def make(
        profile: ProfileConfig | None = None, lora: LoraConfig | None = None, **changes
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
                engine_dir=str(model_folder),
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
