"""Many prompts in batches of 1 to 64, of which a part asks for no drafts."""

from __future__ import annotations

import gc
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.driver import Driver
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import LookaheadSizes, SpeculationConfig

EXAMPLES = Path(__file__).parents[4] / "examples"
MODEL = EXAMPLES / "demo_models" / "base"
MAX_AT_ONCE = 64
BEGINNINGS = (
    "Once upon a time there was a", "It was a dark and", "The old man looked at the sea and",
    "The captain ordered the men to", "The king said to", "In the morning they went down to",
    "She had never seen such a", "There was nothing to be done, and so",
)  # fmt: skip
SAMPLINGS: tuple[dict, ...] = (
    {"top_k": 1},
    {},
    {"top_k": 1, "max_draft_tokens": 0},
    {"top_k": 1, "repetition_penalty": 1.1},
    {"top_k": 1, "max_draft_tokens": 2},
    {"top_k": 20, "temperature": 0.7},
    {"top_p": 0.9, "max_draft_tokens": 0},
)
"""Greedy requests, and requests that draw with a seed; two of seven have no drafts."""

DRAFTERS = {
    "draft_tokens": SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6),
    "ngram": SpeculationConfig(drafter="ngram", is_adaptive=False),
    "lookahead": SpeculationConfig(
        drafter="lookahead", lookahead=LookaheadSizes(5, 4, 5), is_adaptive=False
    ),
    "eagle": SpeculationConfig(
        drafter="eagle", draft_dir=str(EXAMPLES / "draft_heads" / "eagle"),
        max_draft_tokens=4, is_adaptive=False,
    ),
    "draft_model": SpeculationConfig(
        drafter="draft_model", draft_dir=str(EXAMPLES / "demo_models" / "draft"),
        max_draft_tokens=4, is_adaptive=False,
    ),
    "adaptive": SpeculationConfig(drafter="ngram"),
}  # fmt: skip

Asked = list[tuple[list[int], dict]]


def draw(num_prompts: int, num_tokens: int, seed: int) -> Asked:
    """Prompts of 1 to 300 ids, and their fields."""
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    beginnings = [tokenizer.encode(text).ids for text in BEGINNINGS]
    asked = []
    for number in range(num_prompts):
        start = rng.choice(beginnings)
        prompt = start[: rng.randrange(1, len(start) + 1)]
        if rng.random() < 0.3:
            prompt += [rng.randrange(3, 4096) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.3:
            prompt = prompt * rng.randrange(2, 10)
        fields = {"seed": number, **rng.choice(SAMPLINGS)}
        asked.append((prompt[:300], {"max_tokens": num_tokens, **fields}))
    return asked


def with_adapters(asked: Asked) -> Asked:
    """The same requests, every third with one of two LoRA adapters."""
    modules = ("attn_q", "attn_v", "mlp_gate")
    adapters = [
        {"adapter_id": seed, "adapter": on_the_wire(make_adapter(MODEL, seed, 4, modules))}
        for seed in (5, 6)
    ]
    return [
        (prompt, {**fields, **(adapters[number % 2] if number % 3 == 0 else {})})
        for number, (prompt, fields) in enumerate(asked)
    ]


def with_guides(asked: Asked) -> Asked:
    """The same requests, every fifth with a guide, whose output may end earlier."""
    guides = (
        {"guide_type": "regex", "guide": "((red|green|blue) [0-9]{2}, ){12}"},
        {"guide_type": "json_schema", "guide": json.dumps({
            "type": "array", "items": {"enum": ["one fish", "two fish"]}, "minItems": 9,
            "maxItems": 20,
        })},
        {"guide_type": "choice", "guide": json.dumps(["to be", "not to be", "a question"])},
    )  # fmt: skip
    return [
        (prompt, {**fields, **(guides[number % 3] if number % 5 == 1 else {}), "end_id": 1})
        for number, (prompt, fields) in enumerate(asked)
    ]


def corrupt(outputs: list[list[int]]) -> list[tuple[int, ...]]:
    """Drafts of six tokens for each output: right, wrong from a place on, or longer than the
    output."""
    rng = random.Random(6)
    drafts = []
    for output in outputs:
        place = rng.randrange(8)
        wrong = [rng.randrange(3, 4096) for _ in range(6)]
        drafts.append(tuple([*output[:place], *wrong][:6]))
    return drafts


def make_driver(
    speculation: SpeculationConfig,
    device: str = "cpu",
    cache_tokens: int = 12_800,
    ties: tuple[Any, ...] = (),
    **values,
) -> Driver:
    """An engine that keeps some prompts' blocks, and pauses sequences if all are long and the
    cache is small. ``ties`` are those of several ranks."""
    # An engine freezes its objects, so those of the engine before are never freed otherwise.
    gc.unfreeze()
    return Driver(
        EngineConfig(
            model="test", engine_dir=str(MODEL), device=device,
            dtype=values.pop("dtype", "float32"),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=512, max_num_seqs=MAX_AT_ONCE, max_seq_len=600,
                max_input_len=320, policy="max_utilization", expected_output_tokens=1, depth=2,
                speculation=speculation,
            ),
            cache=CacheConfig(tokens_per_block=16, max_tokens=cache_tokens), **values,
        ),
        ties=ties,
    )  # fmt: skip


def serve(
    driver: Driver, asked: Asked, drafts: list[tuple[int, ...]] | None = None
) -> list[list[int]]:
    """The output of each prompt. Prompts come in bursts, once few sequences run."""
    rng = random.Random(7)
    requests: list[int] = []
    left = iter(enumerate(asked))
    scheduler = driver.engine.scheduler
    while burst := list(islice(left, rng.choice([1, 1, 4, 16, 64]))):
        for number, (prompt, fields) in burst:
            own = {} if drafts is None else {"draft_token_ids": drafts[number]}
            if fields.get("max_draft_tokens") == 0:
                own = {}
            requests.append(driver.submit(prompt, **fields, **own))
        few = rng.choice([0, 4, 24, 48])
        while len(scheduler.running) + len(scheduler.waiting) > few:
            driver.step()
    driver.run(max_steps=1_000_000)
    return [driver.output(request) for request in requests]
