"""Whole checkpoints, shards and random weights in a rank's model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import (
    fill_random,
    load_checkpoint,
    load_shard,
)
from trimaran.worker.parallel.tensor_parallel import ShardPosition


def _shards(folder: Path, size: int) -> list[dict[str, torch.Tensor]]:
    return [models.load_ours(folder, ShardPosition(r, size)).state_dict() for r in range(size)]


def _stage(folder: Path, pp_rank: int, pp_size: int):
    found = EngineFolder.load(folder)
    stage = StageRange.of(found.config.num_hidden_layers, pp_rank, pp_size)
    model = build_model(
        found.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    load_checkpoint(model, found.weight_files)
    return model


@pytest.mark.parametrize("size", [2, 4])
def test_column_shards_of_all_ranks_make_up_the_whole_weight(size, tmp_path):
    models.save_huggingface(tmp_path, models.llama_config(attention_bias=True))
    whole = load_file(tmp_path / "model.safetensors")

    shards = _shards(tmp_path, size)

    queries = 8 * 16 // size
    for kind in ("weight", "bias"):
        joined = torch.cat([s[f"layers.1.attention.qkv_proj.{kind}"][:queries] for s in shards])
        assert joined.equal(whole[f"model.layers.1.self_attn.q_proj.{kind}"])
    gate = torch.cat([s["layers.2.mlp.gate_up_proj.weight"][: 96 // size] for s in shards])
    assert gate.equal(whole["model.layers.2.mlp.gate_proj.weight"])


def test_row_shards_of_all_ranks_make_up_the_whole_weight(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    whole = load_file(tmp_path / "model.safetensors")

    shards = _shards(tmp_path, 2)

    down = torch.cat([s["layers.0.mlp.down_proj.weight"] for s in shards], dim=1)
    assert down.equal(whole["model.layers.0.mlp.down_proj.weight"])


def test_ranks_beyond_the_key_value_heads_hold_copies_of_them(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config(num_key_value_heads=2))
    key = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]

    shards = _shards(tmp_path, 4)

    keys = [s["layers.0.attention.qkv_proj.weight"][32:48] for s in shards]
    assert keys[0].equal(key[:16])
    assert keys[1].equal(key[:16])
    assert keys[2].equal(key[16:])
    assert keys[3].equal(key[16:])


def test_the_vocabulary_is_padded_with_zeros(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config(vocab_size=150))
    whole = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    shards = _shards(tmp_path, 2)

    joined = torch.cat([s["embed_tokens.weight"] for s in shards])
    assert joined[:150].equal(whole)
    assert joined.shape[0] == 192
    assert not joined[150:].any()


@pytest.mark.parametrize(
    "config", [models.llama_config(tie_word_embeddings=True), models.gpt2_config()]
)
def test_pipeline_stages_in_turn_give_the_whole_models_hidden_states(config, tmp_path):
    models.save_huggingface(tmp_path, config)
    (prompt,) = models.prompts(9)
    whole = PagedRun(models.load_ours(tmp_path), 1)
    expected = whole.logits({0: prompt})

    first, last = (PagedRun(_stage(tmp_path, rank, 2), 1) for rank in range(2))
    with torch.inference_mode():
        hidden = last.hidden({0: prompt}, hidden=first.hidden({0: prompt}))
        logits = last.model.compute_logits(hidden)

    assert [len(run.caches) for run in (first, last)] == [2, 1]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_a_saved_shard_loads_as_the_same_weights_without_a_copy(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    source = models.load_ours(tmp_path, ShardPosition(1, 2))
    save_file(source.state_dict(), tmp_path / "rank1.safetensors")
    target = build_model(
        source.config, source.stage, ShardPosition(1, 2), dtype=torch.float32, device=models.CPU
    )

    load_shard(target, tmp_path / "rank1.safetensors")

    for name, value in target.state_dict().items():
        assert value.equal(source.state_dict()[name]), name


def test_a_shard_in_another_dtype_is_converted(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    source = models.load_ours(tmp_path)
    save_file(source.state_dict(), tmp_path / "rank0.safetensors")
    target = build_model(
        source.config, source.stage, ShardPosition(), dtype=torch.bfloat16, device=models.CPU
    )

    load_shard(target, tmp_path / "rank0.safetensors")

    expected = source.state_dict()["norm.weight"].bfloat16()
    assert target.state_dict()["norm.weight"].equal(expected)


def _rewrite(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def test_a_missing_tensor_is_refused_by_name(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    _rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"1 missing \(norm\.weight\)"):
        models.load_ours(tmp_path)


def test_an_unexpected_tensor_is_refused_by_name(tmp_path):
    models.save_huggingface(tmp_path, models.gpt2_config())
    _rewrite(tmp_path, lambda tensors: tensors.update(surprise=torch.zeros(2)))
    with pytest.raises(ConfigError, match=r"1 unexpected \(surprise\)"):
        models.load_ours(tmp_path)


def test_a_tensor_of_another_shape_is_refused_by_name_with_both_shapes(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    models.edit_config(tmp_path, intermediate_size=80)
    with pytest.raises(ConfigError, match=r"down_proj.* shape \[64, 96\].* \[64, 80\]"):
        models.load_ours(tmp_path)


def test_checkpoint_tensors_that_carry_no_weight_are_left_out(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    _rewrite(tmp_path, lambda tensors: tensors.update(extra))
    models.load_ours(tmp_path)


BUFFERS = {
    "rotary_emb.inv_freq": torch.zeros(8),
    "self_attn.rotary_emb.cos_cached": torch.zeros(1, 1, 16, 8),
    "self_attn.rotary_emb.sin_cached": torch.zeros(1, 1, 16, 8),
    "attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.bool),
    "attn.masked_bias": torch.tensor(-1e9),
    "attention.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
    "attention.masked_bias": torch.tensor([-1e9]),
    "embeddings.position_ids": torch.arange(16),
}
EVERY_FAMILY = {
    **models.dense_configs(), **models.parallel_configs(), **models.expert_configs(),
    **models.latent_configs(), **models.sink_configs(),
}  # fmt: skip


@pytest.mark.matrix(keep=4)
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_tables_and_masks_that_were_stored_are_left_out_of_every_family(name, tmp_path):
    models.save_huggingface(tmp_path, EVERY_FAMILY[name])
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = [re.match(r".*\.(?:layers|h)\.\d+\.", key) for key in file.keys()]  # noqa: SIM118
    layers = {match[0] for match in found if match}
    extra = {
        f"{layer}{key}": tensor.clone() for layer in layers for key, tensor in BUFFERS.items()
    }
    _rewrite(tmp_path, lambda tensors: tensors.update(extra))
    models.load_ours(tmp_path)


def test_a_bias_of_one_dimension_is_no_mask_and_is_refused(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    extra = {f"model.layers.{number}.self_attn.bias": torch.zeros(64) for number in range(3)}
    _rewrite(tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(ConfigError, match=r"3 unexpected \(model\.layers\.0\.self_attn\.bias"):
        models.load_ours(tmp_path)


def test_random_weights_are_the_same_for_the_same_shard_and_differ_between_shards(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    runs = [models.load_ours(tmp_path, ShardPosition(r, 2)) for r in (0, 0, 1)]
    for model in runs:
        fill_random(model)
    name = "layers.0.mlp.down_proj.weight"
    first, again, other = (model.state_dict()[name] for model in runs)
    assert first.equal(again)
    assert not first.equal(other)
    assert runs[0].state_dict()["norm.weight"].eq(1).all()


def test_weights_outside_the_range_of_float16_are_refused(tmp_path):
    models.save_huggingface(tmp_path, models.llama_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.down_proj.weight"][1, 2] = 7e4
    save_file(tensors, path)
    found = EngineFolder.load(tmp_path)
    stage = StageRange.of(found.config.num_hidden_layers, 0, 1)
    model = build_model(
        found.config, stage, ShardPosition(), dtype=torch.float16, device=models.CPU
    )

    with pytest.raises(
        ConfigError, match=r"0\.mlp\.down_proj\.weight' holds 70000 but float16"
    ):
        load_checkpoint(model, found.weight_files)
