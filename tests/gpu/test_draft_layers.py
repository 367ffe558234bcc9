"""Layers for multi-token prediction, and ReDrafter, draft on a GPU what they draft on a CPU."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.driver import Driver
from tests.unit.worker.speculation.head_reference import random_redrafter
from tests.unit.worker.speculation.mtp_reference import write_deepseek
from trimaran.worker.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from trimaran.worker.config.speculation_config import SpeculationConfig

pytestmark = pytest.mark.gpu

PROMPTS = [[place * 7 % 150 for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 9, 30)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of target and network, by kind of network."""
    root = tmp_path_factory.mktemp("draft-layers")
    config = LlamaConfig(
        vocab_size=150, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "llama")
    head = random_redrafter(root / "head", config, exit_dim=48, is_recurrent=True)
    deepseek = write_deepseek(root / "deepseek")
    return {"mtp": (deepseek, deepseek), "redrafter": (root / "llama", head)}


def run(folders, device, kind, *, has_graphs):
    """Greedy outputs of all prompts at once, and the counts of drafts."""
    target, head = folders
    speculation = SpeculationConfig()
    if kind:
        speculation = SpeculationConfig(
            drafter=kind, draft_dir=str(head), max_draft_tokens=3, is_adaptive=False
        )
    driver = Driver(
        EngineConfig(
            model="test", engine_dir=str(target), device=device, dtype="float32",
            cuda_graphs=has_graphs,
            scheduler=SchedulerConfig(
                max_num_batched_tokens=256, max_num_seqs=4, max_seq_len=128, max_input_len=100,
                # The counts of drafts depend on how early steps are planned.
                depth=2, speculation=speculation,
            ),
            cache=CacheConfig(tokens_per_block=32, max_tokens=1024),
        )
    )  # fmt: skip
    requests = [driver.submit(prompt, max_tokens=24, top_k=1) for prompt in PROMPTS]
    driver.run()
    counts = driver.engine.scheduler.draft_counts
    outputs = [driver.output(request) for request in requests]
    driver.engine.shutdown()
    return outputs, (counts.num_drafts, counts.num_tokens, counts.num_accepted)


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "launched"])
@pytest.mark.parametrize("kind", ["mtp", "redrafter"])
def test_a_network_drafts_on_a_gpu_as_on_a_cpu(folders, kind, has_graphs):
    plain, _ = run(folders[kind], "cuda", "", has_graphs=has_graphs)
    told = run(folders[kind], "cuda", kind, has_graphs=has_graphs)

    assert told[0] == plain
    assert told == run(folders[kind], "cpu", kind, has_graphs=False)
