"""Checkpoints as they lie on people's disks: torch's files, tied heads, padding, quantized."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.models.families import family_configs
from trimaran.worker.config.engine_folder import EngineFolder


@pytest.fixture
def built(trimaran, tmp_path):
    """Build for two ranks; returns the tensors of both."""

    def build(folder):
        output = tmp_path / "engine"
        done = trimaran("build", "--checkpoint", folder, "--output", output, "--tp-size", 2)
        assert done.code == 0, done.err
        return [load_file(path) for path in EngineFolder.load(output).weight_files]

    return build


def _as_torch_files(checkpoint, num_files=1):
    """Replace the safetensors file by what older checkpoints have."""
    (checkpoint.folder / "model.safetensors").unlink()
    names = sorted(checkpoint.tensors)
    if num_files == 1:
        torch.save(checkpoint.tensors, checkpoint.folder / "pytorch_model.bin")
        return
    weight_map = {}
    for number in range(num_files):
        file = f"pytorch_model-{number + 1:05d}-of-{num_files:05d}.bin"
        mine = names[number::num_files]
        torch.save({name: checkpoint.tensors[name] for name in mine}, checkpoint.folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = checkpoint.folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _same(ranks, others):
    return all(
        rank.keys() == other.keys() and all(rank[name].equal(other[name]) for name in rank)
        for rank, other in zip(ranks, others, strict=True)
    )


@pytest.mark.parametrize("num_files", [1, 3])
def test_pytorch_files_are_built_like_safetensors(num_files, llama, built):
    checkpoint = llama(num_key_value_heads=2)
    expected = built(checkpoint.folder)
    _as_torch_files(checkpoint, num_files)
    assert _same(built(checkpoint.folder), expected)


def test_safetensors_are_preferred_to_pytorch_files(llama, built):
    checkpoint = llama()
    expected = built(checkpoint.folder)
    torch.save({}, checkpoint.folder / "pytorch_model.bin")
    assert _same(built(checkpoint.folder), expected)


def test_a_file_that_would_run_code_is_refused(llama, refused):
    class Harmful:
        def __reduce__(self):
            return os.system, ("true",)

    checkpoint = llama()
    (checkpoint.folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Harmful()}, checkpoint.folder / "pytorch_model.bin")
    assert "cannot be read as torch's weights" in refused(checkpoint.folder)


def test_a_training_checkpoint_is_refused(llama, refused):
    checkpoint = llama()
    (checkpoint.folder / "model.safetensors").unlink()
    torch.save(
        {"model": checkpoint.tensors, "step": 3}, checkpoint.folder / "pytorch_model.bin"
    )
    assert "holds more than tensors by name" in refused(checkpoint.folder)


def test_a_torch_file_that_cannot_be_mapped_is_refused(llama, refused):
    checkpoint = llama()
    (checkpoint.folder / "model.safetensors").unlink()
    path = checkpoint.folder / "pytorch_model.bin"
    torch.save(checkpoint.tensors, path, _use_new_zipfile_serialization=False)
    assert "from before torch 1.6" in refused(checkpoint.folder)


def test_a_torn_torch_file_is_refused(llama, refused):
    checkpoint = llama()
    _as_torch_files(checkpoint)
    path = checkpoint.folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-1000])
    assert f"{path}: cannot be read as torch's weights" in refused(checkpoint.folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensor: tensor.to_sparse(), "is sparse. Save the weights with all"),
        (lambda tensor: tensor.to("meta"), "is empty. Save the weights with all"),
        (lambda tensor: torch.tensor(1.0), "has shape []"),
    ],
)
def test_a_tensor_with_missing_values_is_refused(llama, refused, change, words):
    checkpoint = llama()
    (checkpoint.folder / "model.safetensors").unlink()
    name = "model.embed_tokens.weight"
    path = checkpoint.folder / "pytorch_model.bin"
    torch.save({**checkpoint.tensors, name: change(checkpoint.tensors[name])}, path)
    assert f"{path}: the tensor {name!r} {words}" in refused(checkpoint.folder)


def test_a_torch_file_with_a_damaged_index_is_refused(llama, refused):
    checkpoint = llama()
    _as_torch_files(checkpoint)
    path = checkpoint.folder / "pytorch_model.bin"
    raw = path.read_bytes()
    # An instruction that fetches what was never stored.
    at = raw.index(b"torch._utils")
    path.write_bytes(raw[: at - 1] + b"h\xfe" + raw[at + 1 :])
    assert f"{path}: cannot be read as torch's weights" in refused(checkpoint.folder)


def test_a_stored_copy_of_a_tied_head_is_ignored(llama, built):
    checkpoint = llama(tie_word_embeddings=True)
    expected = built(checkpoint.folder)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors[
        "model.embed_tokens.weight"
    ].clone()
    checkpoint.save()
    assert _same(built(checkpoint.folder), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_head_with_other_values_is_refused(dtype, llama, refused):
    checkpoint = llama(tie_word_embeddings=True)
    head = checkpoint.tensors["model.embed_tokens.weight"].clone().to(dtype)
    head[-1, -1] += 1.0
    checkpoint.tensors["lm_head.weight"] = head
    checkpoint.save()

    error = refused(checkpoint.folder)

    assert "'lm_head.weight' is not that of 'model.embed_tokens.weight'" in error
    assert "tie_word_embeddings is true. Set it to false" in error


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", ["gemma3-of-images", "mistral3-of-images"])
def test_a_multimodal_head_is_tied_unless_the_key_or_a_stored_head_contradicts(
    name, is_tied, tmp_path
):
    config = family_configs()[name]
    config.tie_word_embeddings = is_tied
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["tie_word_embeddings"]
    values["text_config"].pop("tie_word_embeddings", None)
    path.write_text(json.dumps(values))

    ours = EngineFolder.load(tmp_path)

    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert (theirs.lm_head.weight is theirs.get_input_embeddings().weight) == is_tied
    assert ours.config.tie_word_embeddings == is_tied


def test_names_without_the_prefix_of_the_whole_model_are_found(llama, built):
    checkpoint = llama()
    expected = built(checkpoint.folder)
    for name in list(checkpoint.tensors):
        checkpoint.tensors[name.removeprefix("model.")] = checkpoint.tensors.pop(name)
    checkpoint.save()
    assert _same(built(checkpoint.folder), expected)


def test_links_as_in_a_download_cache_are_followed(llama, built, tmp_path):
    checkpoint = llama()
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in checkpoint.folder.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert _same(built(snapshot), built(checkpoint.folder))


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_broken_link_of_a_download_cache_is_named(lost, llama, refused, tmp_path):
    for path in llama().folder.iterdir():
        (tmp_path / path.name).symlink_to("../../blobs/0123" if path.name == lost else path)
    error = refused(tmp_path)
    assert f"{tmp_path / lost}: is a link to ../../blobs/0123, which is not there." in error


def test_a_broken_link_named_by_an_index_is_named(llama, refused):
    folder = llama().folder
    link = folder / "model-1.safetensors"
    link.symlink_to("../../blobs/0123")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": link.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{link}: is a link to ../../blobs/0123, which is not there." in refused(folder)


def test_the_folder_of_a_download_cache_leads_to_its_snapshot(llama, refused, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    llama().folder.rename(snapshot)
    assert f"Or was {snapshot} meant?" in refused(snapshot.parents[1])


def test_without_a_dtype_the_weights_keep_theirs(llama, built):
    checkpoint = llama(dtype="bfloat16")
    checkpoint.edit_config(dtype=None)
    assert {tensor.dtype for tensor in built(checkpoint.folder)[0].values()} == {torch.bfloat16}


def test_a_vocabulary_of_other_size_is_refused_with_the_number_to_set(llama, refused):
    checkpoint = llama()
    checkpoint.edit_config(vocab_size=144)
    error = refused(checkpoint.folder)
    assert "[150, 32]" in error and "[144, 32]" in error and "set vocab_size to 150" in error


def test_weights_of_no_layer_of_this_model_are_refused_by_name(llama, refused):
    checkpoint = llama()
    checkpoint.tensors["v_head.summary.weight"] = torch.zeros(1, 32)
    checkpoint.save()
    assert "1 unexpected (v_head.summary.weight)" in refused(checkpoint.folder)


def test_a_shape_is_refused_before_anything_is_written(llama, trimaran, refused, tmp_path):
    checkpoint = llama()
    checkpoint.tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(32, 44)
    checkpoint.save()
    dry = trimaran("build", "--checkpoint", checkpoint.folder, "--dry-run")
    assert dry.code == 2 and "[32, 44]" in dry.err
    assert "[32, 44]" in refused(checkpoint.folder)


def test_a_git_lfs_pointer_instead_of_weights_is_named(llama, refused):
    path = llama().folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "git lfs pull" in refused(path.parent)


@pytest.mark.parametrize(
    ("file", "words"),
    [("model-q4.gguf", "GGUF"), ("consolidated.00.pth", "Hugging Face folder, whose files")],
)
def test_files_of_other_programs_are_named(file, words, llama, refused):
    folder = llama().folder
    (folder / "model.safetensors").rename(folder / file)
    assert words in refused(folder)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ, 4 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "(FP8), as"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "not served: expert_dtype fp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo NVFP4_AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8 bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
    ],
)
def test_quantized_checkpoints_are_refused_by_the_methods_name(method, words, llama, refused):
    checkpoint = llama()
    checkpoint.edit_config(quantization_config=method)
    error = refused(checkpoint.folder)
    assert words in error and "not served" in error and "bfloat16" in error


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("quantize_config.json", {"bits": 2, "group_size": 128}, "GPTQ, 2 bits"),
        ("quant_config.json", {"w_bit": 3}, "AWQ, 3 bits"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            "ModelOpt, W4A8_AWQ",
        ),
    ],
)
def test_a_method_that_writes_a_file_of_its_own_is_recognised(
    file, values, words, llama, refused
):
    folder = llama().folder
    (folder / file).write_text(json.dumps(values))
    error = refused(folder)
    assert words in error and str(folder / file) in error


@pytest.mark.parametrize(
    ("endings", "dtype", "words"),
    [
        ((".qweight", ".qzeros", ".scales", ".g_idx"), torch.int32, "(GPTQ)"),
        ((".qweight", ".qzeros", ".scales"), torch.int32, "(AWQ)"),
        ((".weight", ".weight_scale_inv"), torch.float8_e4m3fn, "(FP8)"),
        ((".weight", ".SCB"), torch.int8, "(bitsandbytes)"),
        ((".weight",), torch.float8_e4m3fn, "(F8_E4M3)"),
    ],
)
def test_quantized_tensors_are_recognised_without_a_key_in_the_configuration(
    endings, dtype, words, llama, refused
):
    checkpoint = llama()
    for number in range(3):
        place = f"model.layers.{number}.mlp.up_proj"
        del checkpoint.tensors[f"{place}.weight"]
        for ending in endings:
            checkpoint.tensors[place + ending] = torch.zeros(48, 32).to(dtype)
    checkpoint.save()
    assert words in refused(checkpoint.folder)


def test_weights_that_float16_cannot_hold_are_refused_by_name(llama, trimaran, tmp_path):
    checkpoint = llama(dtype="bfloat16")
    checkpoint.tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = -1e6
    checkpoint.save()
    words = ("build", "--checkpoint", checkpoint.folder, "--output", tmp_path / "engine")

    done = trimaran(*words, "--tp-size", 2, "--dtype", "float16")

    assert done.code == 2
    assert "'model.layers.1.mlp.up_proj.weight' holds 999424 but float16 ends at" in done.err
    assert not (tmp_path / "engine").exists()
    assert trimaran(*words).code == 0


def test_the_largest_weights_that_float16_holds_are_built(llama, trimaran, tmp_path):
    checkpoint = llama()
    checkpoint.tensors["model.norm.weight"][0] = 65510.0
    checkpoint.save()
    output = tmp_path / "engine"

    done = trimaran(
        "build", "--checkpoint", checkpoint.folder, "--output", output, "--dtype", "float16"
    )

    assert done.code == 0, done.err
    (path,) = EngineFolder.load(output).weight_files
    assert load_file(path)["norm.weight"][0] == 65504.0
