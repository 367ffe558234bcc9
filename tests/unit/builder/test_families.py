"""Every family from a folder of several files through `trimaran build` to two stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

FAMILIES = {
    **models.dense_configs(), **models.parallel_configs(), **models.expert_configs(),
    **models.latent_configs(), **models.sink_configs(),
}  # fmt: skip


def _stage(engine: EngineFolder, pp_rank: int) -> PagedRun:
    stage = StageRange.of(engine.config.num_hidden_layers, pp_rank, 2)
    model = build_model(
        engine.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    load_shard(model, engine.shard_of(pp_rank))
    model.process_weights_after_loading()
    return PagedRun(model, 1)


def _spread(folder: Path) -> None:
    """Over three files with an index, as large checkpoints are, layers and experts apart."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        mine = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(mine, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.matrix(keep=10)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_built_folder_of_two_stages_gives_the_logits_of_transformers(
    name, tmp_path, trimaran
):
    theirs = models.save_huggingface(tmp_path / "model", FAMILIES[name])
    _spread(tmp_path / "model")
    done = trimaran("build", "--checkpoint", tmp_path / "model", "--output",
                    tmp_path / "engine", "--pp-size", "2")  # fmt: skip
    assert done.code == 0, done.err
    engine = EngineFolder.load(tmp_path / "engine")
    first, second = _stage(engine, 0), _stage(engine, 1)
    (prompt,) = models.prompts(40)

    with torch.inference_mode():
        hidden = second.hidden({0: prompt}, hidden=first.hidden({0: prompt}))
        logits = second.model.compute_logits(hidden)

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


def test_a_gpt_neox_with_older_keys_and_buffers_is_the_same_model(tmp_path):
    theirs = models.save_huggingface(tmp_path, FAMILIES["neox-after-each-other-tied"])
    old = {"rope_parameters": None, "rotary_pct": 1.0, "rotary_emb_base": 5000}
    models.edit_config(tmp_path, **old, architectures=None)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_out.weight"] = tensors["gpt_neox.embed_in.weight"].clone()
    for number in range(3):
        layer = f"gpt_neox.layers.{number}.attention"
        tensors[f"{layer}.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        tensors[f"{layer}.masked_bias"] = torch.tensor(-1e9)
        tensors[f"{layer}.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, tmp_path / "model.safetensors")
    (prompt,) = models.prompts(40)

    logits = PagedRun(models.load_ours(tmp_path), 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0].detach()
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
        ("falcon", {"activation": "silu"}, "activation is 'silu'"),
        ("falcon", {"num_attention_heads": 7}, r"\(144\) is not a multiple of .* \(7\)"),
        ("gptj", {"rotary_dim": None}, "rotary_dim is None"),
        ("gptj", {"rotary_dim": 14}, r"rotary_size \(14\) is above head_size \(12\)"),
        (
            "neox",
            {"rope_parameters": {"partial_rotary_factor": 0.01}},
            "rotary_pct times the head size is 0",
        ),
    ],
)
def test_unsupported_features_of_a_family_are_refused_by_name(name, changes, words, tmp_path):
    values = {**FAMILIES[name].to_dict(), "architectures": None, **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        EngineFolder.load(tmp_path, check_weights=False)
