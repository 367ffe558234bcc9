"""Trees of drafts on a GPU: outputs are those without drafts, and trees are those of a CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver
from tests.unit.worker.speculation.head_reference import random_medusa, random_redrafter
from tests.unit.worker.speculation.test_exactness import check, draw, serve
from trimaran.worker.config.draft_tree import MC_SIM_7B_63, DraftTree, tree_of
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = tree_of([[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0, 0]])
TREES = {"draft_model": SMALL, "eagle": SMALL, "medusa": DraftTree(MC_SIM_7B_63)}
DYNAMIC = {"max_draft_tokens": 12, "tree_width": 4, "tree_depth": 4}
KINDS = (*TREES, "draft_model, dynamic", "eagle, dynamic", "redrafter, dynamic")
"""Those of random weights, `RANDOM`, may be right nowhere."""

RANDOM = ("medusa", "redrafter, dynamic")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of target and network, by kind of network."""
    torch.manual_seed(5)
    root = tmp_path_factory.mktemp("trees")
    config = LlamaConfig(
        vocab_size=150, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    target.save_pretrained(root / "llama")
    with torch.no_grad():
        weight = target.lm_head.weight
        weight.add_(torch.randn_like(weight) * 0.05)
    target.save_pretrained(root / "other")
    medusa = random_medusa(root / "medusa", config, num_heads=4)
    base = EXAMPLES / "demo_models" / "base"
    redrafter = random_redrafter(root / "redrafter", config, exit_dim=48, is_recurrent=True)
    return {
        "redrafter": (root / "llama", redrafter),
        "draft_model": (root / "llama", root / "other"),
        "medusa": (root / "llama", medusa),
        "eagle": (base, EXAMPLES / "draft_heads" / "eagle"),
    }


def make_driver(folders, kind, device, *, has_drafts, has_graphs, **changes):
    name, _, dynamic = kind.partition(", ")
    target, head = folders[name]
    speculation = SpeculationConfig()
    if has_drafts:
        own = DYNAMIC if dynamic else {"max_draft_tokens": 64, "tree": TREES[kind].choices}
        speculation = SpeculationConfig(
            drafter=name, draft_dir=str(head), is_adaptive=False, **own
        )
    cache = {"tokens_per_block": 32, "max_tokens": 4096, **changes}
    return Driver(
        EngineConfig(
            model="test", engine_dir=str(target), device=device, dtype="float32",
            cuda_graphs=has_graphs,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=512, max_num_seqs=8, max_seq_len=128, max_input_len=100,
                depth=2, speculation=speculation,
            ),
            cache=CacheConfig(**cache),
        )
    )  # fmt: skip


def run(folders, kind, device, *, has_drafts=True, has_graphs=False):
    """Greedy outputs of all prompts at once, and the counts of drafts."""
    driver = make_driver(folders, kind, device, has_drafts=has_drafts, has_graphs=has_graphs)
    prompts = [[place * 7 % 150 for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 9, 30)]
    requests = [driver.submit(prompt, max_tokens=40, top_k=1) for prompt in prompts]
    driver.run()
    counts = driver.engine.scheduler.draft_counts
    outputs = [driver.output(request) for request in requests]
    driver.engine.shutdown()
    return outputs, (counts.num_drafts, counts.num_tokens, counts.accepted_at)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_drafts_trees_on_a_gpu_as_on_a_cpu(folders, kind):
    outputs, counts = run(folders, kind, "cpu")
    plain, _ = run(folders, kind, "cuda", has_drafts=False)

    assert outputs == plain
    assert sum(counts[2]) or kind in RANDOM
    for has_graphs in (True, False):
        own, (_, _, accepted_at) = run(folders, kind, "cuda", has_graphs=has_graphs)
        assert own == plain
        # Sums of another order may swap drafts that are nearly as likely as each other.
        assert accepted_at == pytest.approx(counts[2], abs=3)


@pytest.mark.parametrize("kind", ["draft_model", "medusa", "draft_model, dynamic"])
def test_penalties_bans_and_pauses_follow_the_path_of_a_row(folders, kind):
    rng = random.Random(3)
    asked = [draw(rng) for _ in range(30)]
    asked = [(prompt, fields) for prompt, fields in asked if "beam_width" not in fields]
    found = []
    for has_drafts in (False, True):
        driver = make_driver(
            folders, kind, "cuda", has_drafts=has_drafts, has_graphs=True, max_tokens=640,
            tokens_per_block=8,
        )  # fmt: skip
        found.append(serve(driver, asked))
        counts = driver.engine.scheduler.draft_counts
        driver.engine.shutdown()
    check(found[1], found[0])
    assert counts.num_tokens
