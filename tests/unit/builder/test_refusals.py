"""Unsupported checkpoints are refused with value and remedy, and no file is written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from trimaran.launcher.cli.main import main


def test_a_missing_tensor_of_a_layer_is_named(llama, refused):
    checkpoint = llama()
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    checkpoint.save()
    error = refused(checkpoint.folder)
    assert "the tensor 'model.layers.1.mlp.up_proj.weight' is missing" in error
    assert "Download the folder again" in error


def test_a_missing_tensor_outside_the_layers_is_named(llama, refused):
    checkpoint = llama()
    del checkpoint.tensors["lm_head.weight"]
    checkpoint.save()
    error = refused(checkpoint.folder)
    assert "1 missing (lm_head.weight)" in error


def test_a_tensor_of_another_shape_is_named_with_both_shapes(llama, refused):
    checkpoint = llama()
    checkpoint.tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(32, 44)
    checkpoint.save()
    error = refused(checkpoint.folder)
    assert "model.layers.2.mlp.down_proj.weight" in error
    assert "[32, 44]" in error and "[32, 48]" in error


def test_fewer_layers_than_configured_are_refused(llama, refused):
    checkpoint = llama()
    checkpoint.edit_config(num_hidden_layers=5)
    error = refused(checkpoint.folder)
    assert ".3." in error and "5 layers" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp-size", "5"], ["num_attention_heads (4)", "tp_size (5)", "smaller --tp-size"]),
        (["--pp-size", "4"], ["pp_size (4)", "num_hidden_layers (3)", "smaller --pp-size"]),
        (["--pp-partition", "1,,2"], ["'1,,2'", "each stage's layers", "14,12,14"]),
        (["--pp-partition", "1,1"], ["(1,1) has 2 layers", "num_hidden_layers is 3"]),
        (["--pp-partition", "1,2", "--pp-size", "3"], ["2 stages but pp_size is 3"]),
        (["--tp-size", "2", "--world-size", "4"], ["--world-size is 4", "is 2"]),
        (["--tp-size", "2", "--moe-tp-size", "2", "--moe-ep-size", "2"], ["--tp-size (2)"]),
        (["--moe-tp-size", "0"], ["--moe-tp-size is 0", "1 or more, or -1"]),
        (["--max-seq-len", "129"], ["--max-seq-len (129)", "128 positions"]),
        (["--max-input-len", "99", "--max-seq-len", "64"], ["(99)", "(64)", "Lower the first"]),
        (["--max-num-tokens", "8", "--max-batch-size", "16"], ["(8)", "(16)", "decode step"]),
        (["--max-batch-size", "65537"], ["--max-batch-size (65537)", "the 65536 sequences"]),
        (["--max-beam-width", "9", "--max-batch-size", "8"], ["--max-beam-width is 9", "(8)"]),
        (
            ["--speculative_decoding_mode", "draft_tokens_external"],
            ["--max_draft_len is 0 but must be 1 to 64"],
        ),
        (
            ["--speculative_decoding_mode", "none", "--max_draft_len", "3"],
            ["--max_draft_len is 3", "is none", "Name draft_tokens_external"],
        ),
        (
            ["--speculative_decoding_mode", "lookahead_decoding"],
            ["--max_draft_len is 0 but must be 1 to 64", "lookahead_decoding"],
        ),
        (["--n_layer", "9"], ["--n_layer is 9", "num_hidden_layers 3", "Remove the flag"]),
    ],
)
def test_impossible_parallel_sizes_are_refused(flags, words, llama, refused):
    error = refused(llama().folder, *flags)
    for word in words:
        assert word in error


@pytest.mark.parametrize("command", [["build", "--checkpoint"], ["verify", "--engine"]])
def test_impossible_numbers_of_build_processes_are_refused(command, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, str(tmp_path), "--workers", "1025"])
    assert ended.value.code == 2
    assert "argument --workers: '1025' is more than 1024: name less" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    [
        "--use_nvfp4",
        "--weight_streaming", "--nougat",
        "--lora_dir=adapters", "--lora_ckpt_source=nemo", "--max_draft_len=65",
        "--cp_size=2", "--kv_cache_type=continuous", "--paged_kv_cache=disable",
        "--max_multimodal_len=64", "--meta_ckpt_dir=x",
        "--use_fp8_context_fmha=enable", "--model_config=x.json",
    ],
)  # fmt: skip
def test_flags_of_unsupported_features_are_refused_by_name(flag, llama, refused):
    error = refused(llama().folder, flag)
    name, _, value = flag.partition("=")
    assert name.replace("-", "_") in error.replace("-", "_")
    assert value in error


def test_flags_needed_only_by_tensorrt_llm_are_accepted_and_named_once(
    llama, trimaran, tmp_path
):
    done = trimaran(
        "build", "--checkpoint_dir", llama().folder, "--output_dir", tmp_path / "engine",
        "--gemm_plugin", "auto", "--gpt_attention_plugin", "float16", "--workers", "4",
        "--context_fmha", "enable", "--remove_input_padding", "enable", "--paged_kv_cache",
        "enable", "--use_paged_context_fmha", "enable", "--max_draft_len", "0",
        "--speculative_decoding_mode", "none", "--lora_plugin", "auto", "--strip_plan",
        "--lora_ckpt_source", "hf", "--lora_target_modules", "attn_q", "attn_v",
        "--max_prompt_embedding_table_size", "64", "--gather_all_token_logits",
    )  # fmt: skip
    assert done.code == 0
    assert done.err.count("accepted without effect") == 1
    assert "--gemm_plugin" in done.err and "--strip_plan" in done.err
    plugins = json.loads((tmp_path / "engine" / "config.json").read_text())["build_config"]
    assert plugins["plugin_config"]["gemm_plugin"] == "auto"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["'BloomForCausalLM'", "LlamaForCausalLM"]),
        (
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": 2,
                "num_experts_per_tok": 3,
            },
            ["num_experts_per_tok (3)", "num_experts (2)"],
        ),
        ({"architectures": None, "model_type": "t5"}, ["'t5'", "GPT2LMHeadModel"]),
        ({"hidden_size": 0}, ["hidden_size is 0", "1 or more"]),
        ({"vocab_size": "many"}, ["vocab_size is 'many'"]),
        ({"num_key_value_heads": 3}, ["(4)", "num_key_value_heads (3)"]),
        ({"rms_norm_eps": None}, ["'rms_norm_eps' is missing"]),
        ({"dtype": "float8"}, ["dtype is 'float8'", "bfloat16"]),
        ({"hidden_act": "relu"}, ["hidden_act is 'relu'", "silu"]),
        (
            {"rope_scaling": {"type": "mrope", "factor": 4.0}},
            ["'mrope'", "linear", "longrope"],
        ),
        ({"rope_theta": "big"}, ["'big' but must be a finite number above 0", "big"]),
        ({"rope_theta": 0}, ["rope_theta is 0 but must be a finite number above 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan but must be a finite number"]),
        ({"vocab_size": 10**30}, [f"vocab_size is {10**30}", "a whole number of 32 bits"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.0}},
            ["rope_scaling.factor is 0.0 but must be a finite number above 0"],
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "model_type": "phi3",
                "partial_rotary_factor": 0.01,
            },
            ["partial_rotary_factor times the head size is 0", "1 or more"],
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantized", "GPTQ", "bfloat16"]),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(changes, words, llama, refused):
    checkpoint = llama()
    checkpoint.edit_config(**changes)
    error = refused(checkpoint.folder)
    assert str(checkpoint.folder / "config.json") in error
    for word in words:
        assert word in error


def test_a_gpt2_that_attends_to_an_encoder_is_refused(gpt2, refused):
    checkpoint = gpt2()
    checkpoint.edit_config(add_cross_attention=True)
    assert "add_cross_attention" in refused(checkpoint.folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_offsets", [0, 1, 2]), ("data_offsets", ["0", "4"]), ("data_offsets", [8, 4]),
        ("data_offsets", None), ("shape", "x"), ("shape", [1.5]), ("shape", [0, 10**20]),
        ("dtype", 5),
    ],
)  # fmt: skip
def test_a_header_without_tensors_is_refused(key, value, llama, refused):
    path = llama().folder / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header["model.norm.weight"][key] = value
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    error = refused(path.parent)
    assert f"{path}: not a whole safetensors file: its header cannot be read" in error


def test_a_truncated_weight_file_is_refused_with_both_sizes(llama, refused):
    path = llama().folder / "model.safetensors"
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    error = refused(path.parent)
    assert str(path) in error and str(whole) in error and str(whole - 100) in error


@pytest.mark.parametrize(
    "contents", [b"", b"abc", b"\x10" + b"\0" * 7 + b"not json at all!", b"\xff" * 64]
)
def test_a_file_that_is_no_safetensors_is_refused(contents, llama, refused):
    path = llama().folder / "model.safetensors"
    path.write_bytes(contents)
    assert f"{path}: not a whole safetensors file" in refused(path.parent)


def test_a_tensor_in_two_files_is_refused_with_both(llama, refused):
    checkpoint = llama()
    (checkpoint.folder / "model.safetensors").rename(checkpoint.folder / "model-a.safetensors")
    twice = {"model.norm.weight": checkpoint.tensors["model.norm.weight"]}
    save_file(twice, checkpoint.folder / "model-b.safetensors")
    error = refused(checkpoint.folder)
    assert "model-b.safetensors: the tensor 'model.norm.weight' was in model-a." in error
    assert "download the folder again" in error


def test_a_folder_without_weights_is_refused(llama, refused):
    folder = llama().folder
    (folder / "model.safetensors").unlink()
    assert "holds no model.safetensors, " in refused(folder)
    (folder / "adapter_model.safetensors").touch()
    assert "pytorch_model.bin, only adapter_model.safetensors. Down" in refused(folder)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_peft_folder_is_named_for_what_it_is(llama, refused, has_config):
    folder = llama().folder
    (folder / "model.safetensors").unlink()
    if not has_config:
        (folder / "config.json").unlink()
    values = {"peft_type": "LORA", "base_model_name_or_path": "maker/base"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    (folder / "adapter_model.safetensors").touch()
    error = refused(folder)
    assert f"{folder}: is a PEFT adapter (LORA, adapter_config.json), not a model" in error
    assert "Name the folder of its base model, maker/base, and give the adapter to" in error


def test_an_index_that_names_an_absent_file_is_refused(llama, refused):
    folder = llama().folder
    absent = {"weight_map": {"lm_head.weight": "model-00007-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(absent))
    (folder / "model.safetensors").unlink()
    assert "model-00007-of-00009.safetensors: cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is empty"), ("{", "is not JSON"), ("[1]", "holds a list"), ("{}", "is not served")],
)
def test_a_broken_configuration_file_is_named(text, words, llama, refused):
    folder = llama().folder
    (folder / "config.json").write_text(text)
    error = refused(folder)
    assert words in error and str(folder / "config.json") in error


def test_an_absent_folder_is_named(tmp_path, refused):
    assert f"{tmp_path / 'nowhere'}: no such folder" in refused(tmp_path / "nowhere")


def test_a_converted_folder_keeps_its_sizes_and_type(llama, trimaran, refused, tmp_path):
    converted = tmp_path / "converted"
    trimaran(
        "convert", "--model_dir", llama().folder, "--output_dir", converted, "--tp_size", 2
    )
    assert "built for tp_size 2" in refused(converted, "--tp-size", "4")
    assert "converted to float32" in refused(converted, "--dtype", "float16")


def test_an_engine_folder_is_refused_as_a_checkpoint(llama, trimaran, refused, tmp_path):
    engine = tmp_path / "built"
    trimaran("build", "--checkpoint", llama().folder, "--output", engine)
    assert "is an engine folder already" in refused(engine)


def test_the_documented_lines_of_gpt_convert_and_build_as_written(
    gpt2, trimaran, tmp_path, monkeypatch
):
    gpt2()
    monkeypatch.chdir(tmp_path)
    convert = (
        "convert -p 8 -i gpt2 -o ./c-model/gpt2 --tensor-parallelism 4 --storage-type float16"
    )
    build = (
        "build --model_dir=./c-model/gpt2/4-gpu/ --world_size=4 --dtype float16 "
        "--use_inflight_batching --use_gpt_attention_plugin float16 --paged_kv_cache "
        "--use_gemm_plugin float16 --remove_input_padding --use_layernorm_plugin float16 "
        "--hidden_act gelu --parallel_build --output_dir=engines/fp16/4-gpu"
    )
    adapters = (
        "build --model_dir=./c-model/gpt2/4-gpu/ --world_size=4 --dtype float16 "
        "--use_lora_plugin float16 --lora_target_modules attn_q attn_k attn_v "
        "--max_lora_rank 8 --max_input_len 64 --max_output_len 50 --output_dir=engines/lora"
    )
    for line in (convert, build, adapters):
        done = trimaran(*line.split())
        assert done.code == 0, done.err
    config = json.loads((tmp_path / "engines/fp16/4-gpu/config.json").read_text())
    assert config["pretrained_config"]["mapping"]["tp_size"] == 4
    assert config["pretrained_config"]["dtype"] == "float16"


def test_two_numbers_of_tensor_ranks_are_refused(gpt2, trimaran):
    words = ("--tp-size", "2", "--tensor-parallelism", "4")
    done = trimaran("convert", "-i", gpt2().folder, *words)
    assert done.code == 2
    assert "--tensor-parallelism is 4 but --tp-size is 2" in done.err
