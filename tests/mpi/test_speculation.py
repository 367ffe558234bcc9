"""Draft tokens change no output of an engine over several ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.driver import Driver, Ranks
from tests.unit.worker.lora_adapters import make_adapter, on_the_wire
from tests.unit.worker.speculation.test_exactness import check, corrupt
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import LookaheadSizes, SpeculationConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "demo_models" / "base"
NETWORKS = {
    "eagle": EXAMPLES / "draft_heads" / "eagle",
    "draft_model": EXAMPLES / "demo_models" / "draft",
}
DRAFTERS = {
    "none": SpeculationConfig(),
    "draft_tokens": SpeculationConfig(drafter="draft_tokens", max_draft_tokens=6),
    "ngram": SpeculationConfig(drafter="ngram", is_adaptive=False),
    "lookahead": SpeculationConfig(
        drafter="lookahead", lookahead=LookaheadSizes(5, 3, 4), is_adaptive=False
    ),
}
SAMPLINGS: tuple[dict, ...] = (
    {"max_tokens": 70},
    {"max_tokens": 9, "top_k": 20, "seed": 3, "return_log_probs": True},
    {"max_tokens": 12, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
)


def make_driver(parallel, ties, speculation):
    scheduler = SchedulerConfig(
        max_num_batched_tokens=96, max_num_seqs=12, max_seq_len=120, max_input_len=100,
        policy="max_utilization", speculation=speculation,
        # A network's drafts stay on the ranks while further steps are planned.
        depth=2 if speculation.is_network else 0,
    )  # fmt: skip
    return Driver(
        EngineConfig(
            model="test", engine_dir=str(MODEL), dtype="float32", device="cpu",
            parallel=parallel, scheduler=scheduler,
            cache=CacheConfig(tokens_per_block=8, max_tokens=768),
        ),
        ties=ties,
    )  # fmt: skip


def serve(driver, asked, drafts):
    requests = []
    for number, (prompt, fields) in enumerate(asked):
        own = {"draft_token_ids": drafts[number]} if drafts else {}
        requests.append(driver.submit(prompt, **fields, **own))
        if number % 3 == 0:
            driver.step()
    driver.run(max_steps=100_000)
    return [
        (
            driver.outputs(request),
            [driver.reasons[request, 0]],
            driver.told(request, "log_probs"),
            [],
        )
        for request in requests
    ]


LAYOUTS = {
    "tp 2": ParallelConfig(tp_size=2),
    "pp 2": ParallelConfig(pp_size=2),
    "dp 2": ParallelConfig(dp_size=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.ranks(2, only=True)
def test_drafts_change_no_output_of_ranks_together(world, layout):
    drafters = dict(DRAFTERS)
    for kind, folder in NETWORKS.items():
        drafters[kind] = SpeculationConfig(
            drafter=kind, draft_dir=str(folder), is_adaptive=False
        )
    rng = random.Random(layout)
    words = [rng.randrange(2, 4000) for _ in range(6)]
    own = make_adapter(MODEL, seed=5, modules=("attn_q", "attn_v", "mlp_gate"))
    adapter = {"adapter_id": 5, "adapter": on_the_wire(own)}
    asked = [
        (
            [rng.choice(words) for _ in range(rng.randrange(1, 40))],
            {**rng.choice(SAMPLINGS), **(adapter if number % 3 == 0 else {})},
        )
        for number in range(14)
    ]
    told: dict[str, list] = {}
    for name, speculation in drafters.items():
        drafts: list = []
        if name == "draft_tokens" and world.rank == 0:
            kinds = ("right", "wrong", "mixed", "beyond")
            plain = [ids[0] for ids, *_ in told["none"]]
            drafts = [corrupt(rng, rng.choice(kinds), output) for output in plain]
        ranks = Ranks(world, LAYOUTS[layout])
        driver = make_driver(LAYOUTS[layout], ranks.ties, speculation)
        told[name] = ranks.run(driver, lambda one, drafts=drafts: serve(one, asked, drafts))
        if world.rank == 0 and name != "none":
            check(told[name], told["none"])
            assert driver.engine.scheduler.draft_counts.num_accepted
