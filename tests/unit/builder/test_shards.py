"""The shards of all ranks together are the checkpoint, for all parallel sizes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.builder import reassembly
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind

SIZES = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)]


def _build(trimaran, checkpoint, tp_size, pp_size, *flags):
    output = checkpoint.folder.parent / "engine"
    done = trimaran("build", "--checkpoint", checkpoint.folder, "--output", output,
                    "--tp-size", tp_size, "--pp-size", pp_size, *flags)  # fmt: skip
    assert done.code == 0, done.err
    return output


def _assert_same_ends(engine, embedding, head):
    assert engine.vocabulary("embed_tokens.weight").equal(embedding)
    # A stage with the tied embedding needs no second copy.
    is_shared = head is embedding and len(engine.num_layers_of_stages) == 1
    assert ("lm_head.weight" in engine.parts) != is_shared
    if not is_shared:
        assert engine.vocabulary("lm_head.weight").equal(head)


def _assert_same_llama(engine, tensors, is_tied):
    config = engine.config
    embedding = tensors["model.embed_tokens.weight"]
    _assert_same_ends(engine, embedding, embedding if is_tied else tensors["lm_head.weight"])
    assert engine.same("norm.weight").equal(tensors["model.norm.weight"])
    for number in range(config.num_hidden_layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        query, key, value = engine.queries_keys_values(f"{ours}.attention.qkv_proj.weight")
        assert query.equal(tensors[f"{theirs}.self_attn.q_proj.weight"])
        assert key.equal(tensors[f"{theirs}.self_attn.k_proj.weight"])
        assert value.equal(tensors[f"{theirs}.self_attn.v_proj.weight"])
        out = engine.columns(f"{ours}.attention.o_proj.weight")
        assert out.equal(tensors[f"{theirs}.self_attn.o_proj.weight"])
        inner = config.intermediate_size
        gate, up = engine.stacked(f"{ours}.mlp.gate_up_proj.weight", [inner, inner])
        assert gate.equal(tensors[f"{theirs}.mlp.gate_proj.weight"])
        assert up.equal(tensors[f"{theirs}.mlp.up_proj.weight"])
        down = engine.columns(f"{ours}.mlp.down_proj.weight")
        assert down.equal(tensors[f"{theirs}.mlp.down_proj.weight"])
        for mine, other in (("attention", "input"), ("mlp", "post_attention")):
            norm = engine.same(f"{ours}.{mine}_norm.weight")
            assert norm.equal(tensors[f"{theirs}.{other}_layernorm.weight"])


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_llama_shards_make_up_the_checkpoint(
    tp_size, pp_size, is_tied, num_kv_heads, llama, trimaran
):
    checkpoint = llama(tie_word_embeddings=is_tied, num_key_value_heads=num_kv_heads)
    engine = reassembly.Reassembled(_build(trimaran, checkpoint, tp_size, pp_size))
    _assert_same_llama(engine, checkpoint.tensors, is_tied)
    assert engine.num_layers_of_stages == ([3] if pp_size == 1 else [2, 1])


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1], [1, 1, 1]])
def test_stages_have_the_layers_of_the_list(sizes, llama, trimaran):
    checkpoint, partition = llama(), ",".join(map(str, sizes))
    path = _build(trimaran, checkpoint, 2, len(sizes), "--pp-partition", partition)
    engine = reassembly.Reassembled(path)
    _assert_same_llama(engine, checkpoint.tensors, is_tied=False)
    assert engine.num_layers_of_stages == sizes
    assert EngineFolder.load(path).mapping.pp_partition == tuple(sizes)


def test_the_layer_list_sets_the_number_of_stages(llama, trimaran, tmp_path):
    done = trimaran("build", "--checkpoint", llama().folder, "--output", tmp_path / "engine",
                    "--pp-partition", "1,1,1")  # fmt: skip
    assert done.code == 0, done.err
    assert EngineFolder.load(tmp_path / "engine").mapping.world_size == 3


def test_attention_biases_are_cut_like_their_weights(llama, trimaran):
    checkpoint = llama(attention_bias=True, num_key_value_heads=2)
    engine = reassembly.Reassembled(_build(trimaran, checkpoint, 4, 1))
    theirs = "model.layers.1.self_attn"
    parts = engine.queries_keys_values("layers.1.attention.qkv_proj.bias")
    for part, letter in zip(parts, "qkv", strict=True):
        assert part.equal(checkpoint.tensors[f"{theirs}.{letter}_proj.bias"])
    out = engine.same("layers.1.attention.o_proj.bias")
    assert out.equal(checkpoint.tensors[f"{theirs}.o_proj.bias"])


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
def test_gpt2_shards_make_up_the_checkpoint(tp_size, pp_size, gpt2, trimaran):
    checkpoint = gpt2()
    engine = reassembly.Reassembled(_build(trimaran, checkpoint, tp_size, pp_size))
    tensors = {name.removeprefix("transformer."): t for name, t in checkpoint.tensors.items()}
    _assert_same_ends(engine, tensors["wte.weight"], tensors["wte.weight"])
    assert engine.same("embed_positions.weight").equal(tensors["wpe.weight"])
    for number in range(3):
        ours, theirs = f"layers.{number}", f"h.{number}"
        for kind in ("weight", "bias"):
            joined = torch.cat(engine.queries_keys_values(f"{ours}.attention.qkv_proj.{kind}"))
            assert joined.equal(tensors[f"{theirs}.attn.c_attn.{kind}"].t())
            up = engine.rows(f"{ours}.mlp.up_proj.{kind}")
            assert up.equal(tensors[f"{theirs}.mlp.c_fc.{kind}"].t())
        for mine, other in (
            ("attention.o_proj", "attn.c_proj"),
            ("mlp.down_proj", "mlp.c_proj"),
        ):
            weight = engine.columns(f"{ours}.{mine}.weight")
            assert weight.equal(tensors[f"{theirs}.{other}.weight"].t())
            bias = engine.same(f"{ours}.{mine}.bias")
            assert bias.equal(tensors[f"{theirs}.{other}.bias"])


def test_a_checkpoint_in_several_files_gives_the_same_shards(llama, trimaran):
    checkpoint = llama()
    names = sorted(checkpoint.tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2],
              "model-00002-of-00002.safetensors": names[1::2]}  # fmt: skip
    (checkpoint.folder / "model.safetensors").unlink()
    for file, chosen in halves.items():
        save_file({n: checkpoint.tensors[n] for n in chosen}, checkpoint.folder / file)
    weight_map = {name: file for file, chosen in halves.items() for name in chosen}
    index = checkpoint.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    engine = reassembly.Reassembled(_build(trimaran, checkpoint, 2, 1))
    _assert_same_llama(engine, checkpoint.tensors, is_tied=False)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_shards_have_the_requested_dtype(dtype, llama, trimaran):
    checkpoint = llama(dtype="bfloat16")
    folder = EngineFolder.load(_build(trimaran, checkpoint, 1, 1, "--dtype", dtype))
    tensors = load_file(folder.weight_files[0])
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}
    assert folder.config.dtype == dtype
    norm = checkpoint.tensors["model.norm.weight"].to(getattr(torch, dtype))
    assert tensors["norm.weight"].equal(norm)


def test_without_a_dtype_shards_keep_that_of_the_checkpoint(llama, trimaran):
    folder = EngineFolder.load(_build(trimaran, llama(dtype="float16"), 1, 1))
    assert folder.config.dtype == "float16"


def test_conversion_and_build_in_two_steps_give_the_folder_of_one_step(
    llama, trimaran, tmp_path
):
    checkpoint = llama()
    once = _build(trimaran, checkpoint, 2, 2, "--dtype", "bfloat16", "--max-batch-size", "8")
    converted, twice = tmp_path / "converted", tmp_path / "twice"
    first = trimaran("convert", "--model_dir", checkpoint.folder, "--output_dir", converted,
                     "--tp_size", 2, "--pp_size", 2, "--dtype", "bfloat16")  # fmt: skip
    assert first.code == 0, first.err
    assert EngineFolder.load(converted).kind is FolderKind.CHECKPOINT
    second = trimaran("build", "--checkpoint_dir", converted, "--output_dir", twice,
                      "--max_batch_size", 8)  # fmt: skip
    assert second.code == 0, second.err
    names = sorted(path.name for path in once.iterdir())
    assert names == ["config.json", *(f"rank{rank}.safetensors" for rank in range(4))]
    for name in names:
        assert (once / name).read_bytes() == (twice / name).read_bytes(), name
