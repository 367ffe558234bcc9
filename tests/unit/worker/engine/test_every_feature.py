"""Requests with every feature drawn at random, 2,000 of them among all cases, a third of them
killed midway.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.driver import Driver
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from trimaran.comm.messages.messages import FinishReason
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    GuidedConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.execution.prompt_tables import PromptTable

MODEL = Path(__file__).parents[4] / "examples" / "demo_models" / "base"
VOCAB, HIDDEN, END = 4096, 256, 1
MAX_AT_ONCE, NUM_ALONE = 60, 30
TASKS = (5, 9, 11)


def make_adapters():
    """The adapter fields of each LoRA task's requests; ranks and modules differ."""
    modules = {5: ("attn_q", "attn_v"), 9: ("mlp_gate", "attn_dense"), 11: ("attn_k",)}
    return {
        task: on_the_wire(make_adapter(MODEL, seed=task, rank=rank, modules=modules[task]))
        for task, rank in zip(TASKS, (2, 4, 8), strict=True)
    }


@pytest.fixture(scope="module")
def adapters():
    """Adapters that all tests share."""
    return make_adapters()


def make_engine(depth, max_tokens, parallel=None, ties=(), device="cpu", speculation=None):
    return Driver(
        EngineConfig(
            model="test",
            engine_dir=str(MODEL),
            dtype="float32",
            device=device,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=128,
                max_num_seqs=24,
                max_seq_len=160,
                max_input_len=120,
                policy="max_utilization",
                max_beam_width=4,
                expected_output_tokens=1,
                depth=depth,
                speculation=speculation or SpeculationConfig(),
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=max_tokens, host_bytes=1 << 22),
            guided=GuidedConfig(backend="xgrammar"),
            parallel=parallel or ParallelConfig(),
        ),
        ties=ties,
    )


def draw(rng: random.Random, adapters) -> dict:
    """A request: its prompt, and features that may be combined."""
    prefix = [rng.randrange(2, 40)] * 24 if rng.random() < 0.5 else []
    prompt = prefix + [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 30))]
    fields = {"prompt": prompt, "max_tokens": rng.randrange(1, 8), "seed": rng.randrange(99)}

    def maybe(chance, **values):
        if rng.random() < chance:
            fields.update(values)

    maybe(0.3, temperature=rng.choice([0.0, 0.5, 1.3]), top_k=rng.choice([0, 1, 5, 500]))
    maybe(0.3, top_p=rng.choice([0.3, 0.9, 1.0]), top_p_decay=0.9, top_p_min=0.2)
    maybe(0.2, min_p=0.05)
    maybe(0.2, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.2)
    maybe(0.2, no_repeat_ngram_size=2)
    maybe(0.2, end_id=END, min_tokens=rng.randrange(4))
    maybe(0.2, stop_words=((7, 8), (rng.randrange(VOCAB),)), bad_words=((3,), (4, 5)))
    maybe(
        0.1, embedding_bias=np.random.default_rng(1).normal(size=VOCAB).astype("<f4").tobytes()
    )
    maybe(0.2, return_log_probs=True)
    maybe(0.1, return_context_logits=True, logits_dtype="float16")
    maybe(0.1, return_generation_logits=True)
    maybe(0.3, return_perf_metrics=True)
    maybe(0.3, streaming=True)
    maybe(0.2, cache_salt=b"tenant")
    maybe(0.2, priority=rng.randrange(-2, 3))
    maybe(0.1, retention={"ranges": [[0, 16, 80, -1]], "output": [20, 50]})
    if rng.random() < 0.2:
        task = rng.choice(TASKS)
        fields.update(adapter_id=task, adapter=adapters[task])
    if rng.random() < 0.15:
        table = np.random.default_rng(rng.randrange(3)).normal(0, 0.1, (4, HIDDEN))
        data = table.astype(np.float16).tobytes()
        fields["embeddings"] = PromptTable("FP16", table.shape, data).to_wire()
        fields["cache_salt"] = data[:16]
        fields["prompt"] = [*prompt, VOCAB, VOCAB + 3, VOCAB + 1]
    kind = rng.random()
    if kind < 0.12:
        width = rng.randrange(2, 5)
        fields.update(beam_width=width, num_return_sequences=rng.randrange(1, width + 1))
        fields.update(length_penalty=rng.choice([0.0, 1.0]), early_stopping=rng.choice([0, 1]))
    elif kind < 0.22:
        fields.update(guide_type="regex", guide="(red|green|blue) [0-9]{2,4}", end_id=END)
    elif kind < 0.32:
        fields["num_return_sequences"] = 2
    return fields


def outputs_of(driver: Driver, request: int, fields: dict) -> list:
    """All ids of a request."""
    if fields.get("beam_width", 1) > 1:
        return driver.extras[request, 0][-1]["beams"]["ids"]
    count = fields.get("num_return_sequences", 1)
    return [driver.output(request, index) for index in range(count)]


def kill(driver: Driver, rng: random.Random, request: int, source: str) -> None:
    """End one request in one of the possible ways."""
    way = rng.randrange(3)
    if way == 0:
        driver.engine.cancel(source, [request])
    elif way == 1:
        driver.engine.stop(f"name {request}")
    else:
        driver.engine.drop_source(source)


def run_all(driver: Driver, asked: list[dict], rng: random.Random) -> set[int]:
    """Serve all, some dozens at a time; returns the requests that were killed."""
    killed, alive = set(), {}
    for number, fields in enumerate(asked, 1):
        source = f"client {number}"
        fields = {"client_request_id": f"name {number}", **fields}
        assert driver.submit(source=source, **fields) == number
        alive[number] = source
        while len(alive) >= MAX_AT_ONCE:
            driver.step()
            ended = {request for request, _ in driver.reasons}
            alive = {r: s for r, s in alive.items() if r not in ended and r not in killed}
        if number % 3 == 0:
            victim = rng.choice(list(alive))
            kill(driver, rng, victim, alive[victim])
            killed.add(victim)
    driver.run(max_steps=100_000)
    return killed


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("num_requests", [250, 2000])
def test_all_features_together_give_the_tokens_of_each_alone_and_free_everything(
    adapters, num_requests
):
    rng = random.Random(3)
    asked = [draw(rng, adapters) for _ in range(num_requests)]
    driver = make_engine(depth=2, max_tokens=1024)

    killed = run_all(driver, asked, rng)

    assert len(killed) >= num_requests // 4
    driver.submit([2], max_tokens=1)
    driver.run(max_steps=100_000)
    driver.check_idle()
    runner = driver.engine.runner
    assert driver.engine._adapters.num_used == 0
    assert runner.end._logits_rows.is_empty and runner._prompt_tables.is_empty
    natural = {FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH}
    whole = [r for r in range(1, num_requests + 1) if r not in killed]
    assert {driver.reasons[request, 0] for request in whole} <= natural
    alone = make_engine(depth=1, max_tokens=1024)
    for request in rng.sample(whole, NUM_ALONE):
        fields = asked[request - 1]
        again = alone.submit(**fields)
        alone.run(max_steps=100_000)
        assert outputs_of(alone, again, fields) == outputs_of(driver, request, fields), fields
