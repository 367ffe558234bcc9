"""Networks that draft, cut for several ranks: drafts and outputs are those of one rank."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver, Ranks
from tests.unit.worker.speculation.head_reference import (
    random_eagle,
    random_medusa,
    random_redrafter,
)
from tests.unit.worker.speculation.mtp_reference import write_deepseek
from trimaran.worker.config.engine_config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trimaran.worker.config.speculation_config import SpeculationConfig

ONE = ParallelConfig()
LAYOUTS = {
    "tp 2": ParallelConfig(tp_size=2),
    "tp 2, whole experts": ParallelConfig(tp_size=2, moe_tp_size=1, moe_ep_size=2),
    "pp 2": ParallelConfig(pp_size=2),
    "pp 2, tp 2": ParallelConfig(pp_size=2, tp_size=2),
    "pp 2, one layer first": ParallelConfig(pp_size=2, pp_partition=(1, 5)),
}
PROMPTS = [[place * 7 % 150 for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 9, 30)]


@pytest.fixture
def root(world):
    """An empty folder of all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(world.comm.bcast(own))
        world.barrier(60.0, "read by all")


def write_llama(root):
    """A Llama with an EAGLE-3 head whose drafts are sometimes right, and other heads."""
    config = LlamaConfig(
        vocab_size=150, hidden_size=64, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "llama")
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight) * 0.05)
    model.save_pretrained(root / "draft_model")
    random_eagle(root / "eagle", config, draft_vocab=150, scale=0.2)
    random_medusa(root / "medusa", config, num_heads=3)
    random_redrafter(root / "redrafter", config, exit_dim=48, is_recurrent=True)


def run(driver):
    """Outputs of all prompts, and the counts of drafts."""
    samplings = ({"top_k": 1}, {"top_k": 20, "seed": 4})
    requests = [
        driver.submit(prompt, max_tokens=24, **sampling)
        for prompt in PROMPTS
        for sampling in samplings
    ]
    driver.run()
    counts = driver.engine.scheduler.draft_counts
    return (
        [driver.output(request) for request in requests],
        (counts.num_drafts, counts.num_tokens, counts.num_accepted),
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "tp 2") for kind in ("eagle", "medusa", "redrafter")),
        *((kind, "pp 2") for kind in ("eagle", "medusa", "redrafter")),
        ("eagle", "pp 2, one layer first"),
        *(("mtp", layout) for layout in ("tp 2", "tp 2, whole experts", "pp 2")),
    ],
)
@pytest.mark.ranks(2, only=True)
def test_two_ranks_draft_as_one_rank_does(world, root, kind, layout):
    check(world, root, kind, layout)


TREE = {"tree": ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)), "max_draft_tokens": 6}
DYNAMIC = {"tree_width": 3, "tree_depth": 3, "max_draft_tokens": 8}


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
@pytest.mark.parametrize(
    ("kind", "drafts"), [("eagle", DYNAMIC), ("medusa", TREE), ("draft_model", TREE)]
)
@pytest.mark.ranks(2, only=True)
def test_two_ranks_draft_the_trees_of_one_rank(world, root, kind, drafts, layout):
    check(world, root, kind, layout, drafts)


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("kind", ["eagle", "redrafter", "mtp"])
@pytest.mark.ranks(4, only=True)
def test_two_stages_of_two_ranks_draft_as_one_rank_does(world, root, kind):
    check(world, root, kind, "pp 2, tp 2")


def check(world, root, kind, layout, drafts=None):
    """Compare the ranks' outputs and drafts with those of one rank."""
    if world.rank == 0:
        if kind == "mtp":
            write_deepseek(root / "mtp")
        else:
            write_llama(root)
    world.barrier(60.0, "written")

    def make_driver(parallel, ties=()):
        return Driver(
            EngineConfig(
                model="test", engine_dir=str(root / ("mtp" if kind == "mtp" else "llama")),
                dtype="float32", device="cpu", parallel=parallel,
                scheduler=SchedulerConfig(
                    max_num_batched_tokens=48, max_num_seqs=6, max_seq_len=120,
                    max_input_len=100, policy="max_utilization", depth=2,
                    speculation=SpeculationConfig(
                        drafter=kind, draft_dir=str(root / kind), is_adaptive=False,
                        **(drafts or {"max_draft_tokens": 3}),
                        # Stages await the drafts.
                        is_overlapped=not layout.startswith("pp"),
                    ),
                ),
                cache=CacheConfig(tokens_per_block=8, max_tokens=768),
            ),
            ties=ties,
        )  # fmt: skip

    ranks = Ranks(world, LAYOUTS[layout])
    told = ranks.run(make_driver(LAYOUTS[layout], ranks.ties), run)
    if world.rank == 0:
        outputs, (num_drafts, num_tokens, num_accepted) = told
        alone = run(make_driver(ONE))
        if layout.startswith("pp") and drafts is not None:
            # Steps with other sequences have rows for other numbers of nodes.
            assert outputs == alone[0]
            assert num_accepted or kind == "medusa"
        elif layout.startswith("pp"):
            # Stages share the sequences out over other steps, in which other drafts have room.
            assert (outputs, num_accepted) == (alone[0], alone[1][2])
        else:
            assert told == alone
        assert num_drafts < num_tokens
