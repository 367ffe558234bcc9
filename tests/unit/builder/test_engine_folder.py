"""A model folder is read without torch, and damage is named before a rank starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder, FolderKind
from trimaran.worker.config.parallel_sizes import RequestedSizes, layout_of
from trimaran.worker.config.pretrained_config import PretrainedConfig

EXTERNAL, LOOKAHEAD = "draft_tokens_external", "lookahead_decoding"


@pytest.fixture
def engine(llama, trimaran, tmp_path):
    """An engine folder for two ranks."""
    output = tmp_path / "engine"
    done = trimaran("build", "--checkpoint", llama().folder, "--output", output, "--tp-size", 2)
    assert done.code == 0, done.err
    return output


def _edit(engine, edit):
    path = engine / "config.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def test_an_engine_folder_reads_back_as_built(engine, llama):
    folder = EngineFolder.load(engine)
    assert folder.kind is FolderKind.ENGINE
    assert (folder.mapping.world_size, folder.mapping.tp_size, folder.mapping.pp_size) == (
        2,
        2,
        1,
    )
    assert folder.config.num_hidden_layers == 3
    assert folder.config.eos_token_ids == (2,)
    assert folder.max_seq_len == 128
    assert folder.shard_of(1) == engine / "rank1.safetensors"


@pytest.mark.parametrize(
    ("flags", "filed", "mode", "most"),
    [
        (("--speculative_decoding_mode", EXTERNAL, "--max_draft_len", 7), {}, EXTERNAL, 7),
        (("--max_draft_len", 7), {"max_draft_len": 3}, EXTERNAL, 7),
        ((), {"max_draft_len": 7, "speculative_decoding_mode": EXTERNAL}, EXTERNAL, 7),
        (("--speculative_decoding_mode", LOOKAHEAD, "--max_draft_len", 6), {}, LOOKAHEAD, 6),
        # The tree of window 7, n-grams of 7 and 7 of them.
        (("--speculative_decoding_mode", LOOKAHEAD, "--max_draft_len", 83), {}, LOOKAHEAD, 64),
    ],
    ids=[
        "both flags", "the flag of older versions", "a file", "lookahead",
        "the tree of lookahead",
    ],
)  # fmt: skip
def test_an_engine_folder_records_the_draft_tokens_that_it_is_built_for(
    llama, trimaran, tmp_path, flags, filed, mode, most
):
    output, limits = tmp_path / "engine", tmp_path / "limits.json"
    limits.write_text(json.dumps(filed))
    done = trimaran(
        "build", "--checkpoint", llama().folder, "--output", output, "--build-config", limits,
        *flags,
    )  # fmt: skip
    assert done.code == 0, done.err
    build = EngineFolder.load(output).build
    assert (build.speculative_decoding_mode, build.max_draft_len) == (mode, most)


def test_an_engine_folder_is_built_for_no_draft_tokens_by_default(engine):
    build = EngineFolder.load(engine).build
    assert (build.speculative_decoding_mode, build.max_draft_len) == ("none", 0)


def test_reading_a_folder_imports_no_torch(engine):
    code = (
        "import sys; from trimaran.worker.config.engine_folder import EngineFolder; "
        f"EngineFolder.load({str(engine)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (4, 1), (1, 2)])
def test_another_world_size_is_refused_with_both_sizes(tp_size, pp_size, engine):
    with pytest.raises(
        ConfigError, match=r"built for tp_size 2 .*Start 2 ranks, or build again"
    ):
        EngineFolder.load(engine).check_parallel(tp_size, pp_size)


def test_a_folder_of_uneven_stages_runs_only_with_these_stages(llama, trimaran, tmp_path):
    words = [
        "--checkpoint",
        llama().folder,
        "--output",
        tmp_path / "e",
        "--pp-partition",
        "1,2",
    ]
    assert trimaran("build", *words).code == 0
    folder = EngineFolder.load(tmp_path / "e")
    for asked in ({}, {"world_size": 2}, {"pp_size": 2}, {"pp_partition": (1, 2)}):
        assert layout_of(RequestedSizes(**asked), folder).pp_partition == (1, 2)
    with pytest.raises(ConfigError, match=r"built for stages of 1,2 layers.* with 2,1"):
        layout_of(RequestedSizes(pp_partition=(2, 1)), folder)
    with pytest.raises(
        ConfigError, match=r"built for .* pp_size 2.*with --tp-size 1 --pp-size 3"
    ):
        layout_of(RequestedSizes(pp_size=3), folder)


def test_a_configuration_with_other_stages_is_refused(engine):
    def edit(values):
        values["pretrained_config"]["mapping"]["pp_partition"] = [2]

    _edit(engine, edit)
    with pytest.raises(ConfigError, match=r"config\.json: pp_partition \(2\) has 2 layers"):
        EngineFolder.load(engine)


def test_a_truncated_shard_is_refused(engine):
    path = engine / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"rank1\.safetensors: not a whole safetensors file"):
        EngineFolder.load(engine)


def test_a_shard_of_another_build_is_refused(engine, llama, trimaran, tmp_path):
    other = tmp_path / "other"
    trimaran("build", "--checkpoint", engine.parent / "llama", "--output", other)
    (engine / "rank1.safetensors").write_bytes((other / "rank0.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"rank1\.safetensors: has .* another build"):
        EngineFolder.load(engine)


def test_a_lost_shard_is_refused(engine):
    (engine / "rank0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"rank0\.safetensors: missing.*2 ranks"):
        EngineFolder.load(engine)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda v: v.update(format_version=99), "format_version is 99.*reads 1"),
        (lambda v: v.pop("format_version"), "format_version is None"),
        (lambda v: v.pop("build_config"), "build_config is None but must be an object"),
        (lambda v: v["pretrained_config"].pop("mapping"), "mapping is None"),
        (lambda v: v["pretrained_config"].pop("hidden_size"), "'hidden_size'"),
        (lambda v: v["pretrained_config"]["mapping"].update(world_size=3), "is 3 .* is 2"),
        (lambda v: v["pretrained_config"]["mapping"].update(tp_size="2"), "tp_size is '2'"),
        (lambda v: v["build_config"].update(max_batch_size=-1), "max_batch_size is -1"),
        (lambda v: v["build_config"].update(plugin_config=3), "plugin_config is"),
        (lambda v: v["build_config"]["plugin_config"].update(tokens_per_block=0), "is 0"),
        (
            lambda v: v["pretrained_config"]["quantization"].update(quant_algo="FP8"),
            "quant_algo is 'FP8' without our rules",
        ),
        (
            lambda v: v["pretrained_config"].update(architecture="OPTForCausalLM"),
            "'OPTForCausalLM' is not served",
        ),
    ],
)
def test_a_damaged_configuration_is_refused_with_key_and_value(edit, words, engine):
    _edit(engine, edit)
    with pytest.raises(ConfigError, match=words) as refusal:
        EngineFolder.load(engine)
    assert str(engine / "config.json") in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab_size", 151, "vocab_size is 151, but rank0.safetensors was cut for 150. Set it"),
        ("hidden_size", 2**31 - 1, "hidden_size is 2147483647, but .* cut for 32"),
        ("num_attention_heads", 3, r"num_attention_heads \(3\) is not a multiple of"),
        ("num_key_value_heads", 2, "num_key_value_heads is 2, but .* cut for 4"),
        ("max_position_embeddings", 2**31 - 1, "max_position_embeddings is .* cut for 128"),
        ("tie_word_embeddings", True, "tie_word_embeddings is true, but .* cut for false"),
        ("dense_layers", [-1], r"dense_layers is \[-1\], but .* cut for \[\]"),
        ("head_size", -16, "head_size is -16 but must be a whole number of 1 or more"),
        ("rotary_size", -1, "rotary_size is -1 but must be a finite number of 0 or more"),
        ("rotary_size", 3, "rotary_size is 3, but so many dims of a head are rotated"),
        ("q_lora_rank", -1, "q_lora_rank is -1 but must be a finite number of 0 or more"),
        ("norm_epsilon", -1.0, "norm_epsilon is -1.0 but must be a finite number of 0 or more"),
        ("rotary_base", 0.0, "rotary_base is 0.0 but must be a finite number above 0"),
        ("query_scale", -1.0, "query_scale is -1.0 but must be a finite number of 0 or more"),
        ("attn_soft_cap", -1.0, "attn_soft_cap is -1.0 but must be a finite number of 0"),
    ],
)
def test_an_edited_size_is_refused_by_its_key(key, value, words, engine):
    _edit(engine, lambda values: values["pretrained_config"].update({key: value}))
    with pytest.raises(ConfigError, match=words) as refusal:
        EngineFolder.load(engine)
    assert str(engine / "config.json") in str(refusal.value)


def test_a_configuration_nested_deeper_than_can_be_read_is_refused(engine):
    (engine / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match="is not JSON: it is nested too deep"):
        EngineFolder.load(engine)


def test_parallel_sizes_other_than_those_of_the_build_are_refused_by_their_key(engine):
    def edit(values):
        sizes = {"tp_size": 1, "pp_size": 2, "pp_partition": [1, 2]}
        values["pretrained_config"]["mapping"].update(sizes)

    _edit(engine, edit)
    with pytest.raises(ConfigError, match=r"mapping\.tp_size is 1, but rank0.* cut for 2"):
        EngineFolder.load(engine)


def test_older_folders_without_parallel_sizes_are_read(engine):
    path = engine / "rank0.safetensors"
    with safe_open(path, "pt") as file:
        assert "vocab_size" in file.metadata()["origin"]
    save_file(load_file(path), path, {"format": "pt"})
    _edit(engine, lambda values: values.pop("shards"))

    assert EngineFolder.load(engine).config.vocab_size == 150


def test_a_hugging_face_folder_fits_any_sizes_that_leave_each_rank_a_head(llama):
    folder = EngineFolder.load(llama().folder)
    assert folder.kind is FolderKind.HUGGINGFACE
    assert folder.mapping is None
    for tp_size in (3, 4):
        folder.check_parallel(tp_size, 1)
    with pytest.raises(ConfigError, match=r"tp_size \(5\) is above num_attention_heads \(4\)"):
        folder.check_parallel(5, 1)


@pytest.mark.parametrize("dims", [1, 7])
def test_a_rotation_of_an_odd_number_of_dims_is_refused(llama, dims):
    with pytest.raises(ConfigError, match=f"head_size is {dims}, but so many dims of a head"):
        EngineFolder.load(llama(head_dim=dims).folder)


def test_random_weights_need_no_files(llama):
    folder = llama().folder
    (folder / "model.safetensors").unlink()
    assert EngineFolder.load(folder, check_weights=False).weight_files == ()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_every_spelling_of_rotary_scaling_is_equivalent(rope, llama):
    checkpoint = llama()
    checkpoint.edit_config(**{"rope_theta": None, **rope})
    config = EngineFolder.load(checkpoint.folder).config
    assert config.rotary_base == 5e5
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_several_end_ids_and_the_old_spelling_of_dtype_are_read(llama):
    checkpoint = llama()
    checkpoint.edit_config(eos_token_id=[2, 5], dtype=None, torch_dtype="float16")
    config = EngineFolder.load(checkpoint.folder).config
    assert config.eos_token_ids == (2, 5)
    assert config.dtype == "float16"


def test_gpt2_sizes_are_read_under_the_common_names(gpt2):
    config = EngineFolder.load(gpt2().folder).config
    assert config.architecture == "GPT2LMHeadModel"
    assert (config.hidden_size, config.head_size, config.intermediate_size) == (32, 8, 48)
    assert config.tie_word_embeddings and config.attn_bias and config.mlp_bias
    assert config.position_embedding_type == "learned_absolute"


def test_a_configuration_survives_json(llama):
    checkpoint = llama()
    checkpoint.edit_config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    config = EngineFolder.load(checkpoint.folder).config
    again = PretrainedConfig.from_dict(json.loads(json.dumps(config.to_dict())), "x")
    assert again == config


@pytest.mark.parametrize(("vocab_size", "tp_size", "padded"), [(150, 1, 192), (150, 4, 192),
                         (50257, 2, 50304), (128, 3, 192), (4096, 8, 4096)])  # fmt: skip
def test_the_padded_vocabulary_divides_by_the_ranks(vocab_size, tp_size, padded, llama):
    checkpoint = llama()
    checkpoint.edit_config(vocab_size=vocab_size)
    config = EngineFolder.load(checkpoint.folder, check_weights=False).config
    assert config.padded_vocab_size(tp_size) == padded
