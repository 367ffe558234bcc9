"""`trimaran build` of GGUF files: the same weights, text and tokens as other programs read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.unit.builder.gguf_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Vocabulary,
    write_gguf,
)
from tests.unit.worker.models import models
from tests.unit.worker.models.paged_run import PagedRun
from trimaran.kernels.integer_reference import dequantize
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.gguf_file import GGUF_TYPES
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_shard
from trimaran.worker.parallel.tensor_parallel import ShardPosition

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def built(trimaran, tmp_path):
    """Build an engine folder."""

    def build(path, *flags):
        output = tmp_path / "engine"
        done = trimaran("build", "--checkpoint", path, "--output", output, *flags)
        assert done.code == 0, done.err
        return output

    return build


def _fused(tensors, number):
    """A layer's tensors as an engine folder of one rank holds them."""
    layer = f"model.layers.{number}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return {
        "attention.qkv_proj.weight": torch.cat(
            [tensors[f"{attention}.{each}_proj.weight"] for each in "qkv"]
        ),
        "attention.o_proj.weight": tensors[f"{attention}.o_proj.weight"],
        "attention_norm.weight": tensors[f"{layer}.input_layernorm.weight"],
        "mlp_norm.weight": tensors[f"{layer}.post_attention_layernorm.weight"],
        "mlp.gate_up_proj.weight": torch.cat(
            [tensors[f"{mlp}.{each}_proj.weight"] for each in ("gate", "up")]
        ),
        "mlp.down_proj.weight": tensors[f"{mlp}.down_proj.weight"],
    }


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_weights_of_each_type_are_those_that_gguf_dequantizes_rounded_to_bfloat16(
    kind, tmp_path, built
):
    written = write_gguf(tmp_path / "model.gguf", kind)
    stored = load_file(EngineFolder.load(built(written.path)).weight_files[0])
    assert stored["embed_tokens.weight"][:VOCAB].equal(
        written.tensors["model.embed_tokens.weight"].bfloat16()
    )
    assert "lm_head.weight" not in stored
    for number in range(LAYERS):
        for name, expected in _fused(written.tensors, number).items():
            assert stored[f"layers.{number}.{name}"].equal(expected.bfloat16()), name


def _ranks(folder, size):
    """Each rank's model of an engine folder, before its weights are converted."""
    engine = EngineFolder.load(folder)
    stage = StageRange.of(engine.config.num_hidden_layers, 0, 1)
    for rank in range(size):
        model = build_model(
            engine.config,
            stage,
            ShardPosition(rank, size),
            dtype=torch.float32,
            device=models.CPU,
        )
        load_shard(model, engine.shard_of(rank))
        yield model


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_kept_integers_are_to_the_bit_the_numbers_that_gguf_dequantizes(kind, tmp_path, built):
    written = write_gguf(tmp_path / "model.gguf", kind)
    folder = built(written.path, "--quantization", "gguf", "--tp-size", "2")
    ranks = list(_ranks(folder, 2))
    for number in range(LAYERS):
        layers = [model.layers[str(number)] for model in ranks]
        downs = [layer.mlp.down_proj for layer in layers]
        found = torch.cat([dequantize(each.method.weight_of(each)) for each in downs], 1)
        expected = written.tensors[f"model.layers.{number}.mlp.down_proj.weight"]
        assert found.equal(expected)
        qkv = [layer.attention.qkv_proj for layer in layers]
        weights = [dequantize(each.method.weight_of(each)) for each in qkv]
        sizes = HEADS * HEAD_DIM // 2, KV_HEADS * HEAD_DIM // 2, KV_HEADS * HEAD_DIM // 2
        parts = zip(*(weight.split(sizes) for weight in weights), strict=True)
        for name, part in zip("qkv", parts, strict=True):
            expected = written.tensors[f"model.layers.{number}.self_attn.{name}_proj.weight"]
            assert torch.cat(part).equal(expected), name


def test_a_file_without_such_integers_or_no_file_is_refused(tmp_path, trimaran, llama):
    written = write_gguf(tmp_path / "model.gguf", "Q5_0")
    for checkpoint, words in (
        (written.path, "no matrices of"),
        (llama().folder, "keeps the integers of a GGUF file"),
    ):
        done = trimaran(
            "build", "--checkpoint", checkpoint, "--output", tmp_path / "out",
            "--quantization", "gguf",
        )  # fmt: skip
        assert done.code == 2 and words in done.err


def _theirs(architecture, tensors, **changes):
    config_class, model_class = FAMILIES[architecture]
    config = config_class(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, max_position_embeddings=128, rms_norm_eps=1e-5, eos_token_id=None,
        bos_token_id=None, **changes,
    )  # fmt: skip
    model = model_class(config).eval()
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    model.load_state_dict({**tied, **tensors})
    return model


def _ours(folder):
    engine = EngineFolder.load(folder)
    stage = StageRange.of(engine.config.num_hidden_layers, 0, 1)
    model = build_model(
        engine.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    load_shard(model, engine.shard_of(0))
    model.process_weights_after_loading()
    return PagedRun(model, 1)


def _llama3_factors():
    config = PretrainedConfig(
        hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=128, rope_parameters=LLAMA3,
    )  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 1.0 / 10000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return (plain / scaled).numpy().astype(np.float32)


@pytest.mark.parametrize(
    ("architecture", "kind", "is_tied", "rope"),
    [
        ("llama", "F32", True, None),
        ("llama", "Q4_1", False, None),
        ("llama", "Q8_0", True, LLAMA3),
        ("qwen2", "Q4_0", True, YARN),
        ("qwen3", "F16", False, None),
    ],
)
def test_the_greedy_text_is_that_of_transformers(
    architecture, kind, is_tied, rope, tmp_path, built
):
    keys, tensors = {}, {}
    if rope is LLAMA3:
        tensors = {"rope_freqs.weight": _llama3_factors()}
    if rope is YARN:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
        keys = {f"{architecture}.rope.scaling.{key}": value for key, value in scaling.items()}
    path = tmp_path / "model.gguf"
    written = write_gguf(path, kind, architecture, keys=keys, tensors=tensors, is_tied=is_tied)
    changes = {"tie_word_embeddings": is_tied, **({"rope_parameters": rope} if rope else {})}
    theirs = _theirs(architecture, written.tensors, **changes)
    ours = _ours(built(path, "--dtype", "float32"))
    prompts = models.prompts(20, vocab_size=VOCAB)
    with torch.inference_mode():
        logits = theirs(torch.tensor(prompts)).logits[0, -1]
        torch.testing.assert_close(
            ours.logits({0: prompts[0]})[-1], logits, atol=2e-4, rtol=1e-3
        )
        expected = models.reference_greedy(theirs, prompts, 20)
        assert _ours(tmp_path / "engine").greedy(prompts, 20) == expected


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_kept_integers_give_the_text_of_the_dequantized_model(kind, tmp_path, built):
    written = write_gguf(tmp_path / "model.gguf", kind, "qwen3")
    theirs = _theirs("qwen3", written.tensors, tie_word_embeddings=True)
    prompts = models.prompts(20, vocab_size=VOCAB)
    folder = built(written.path, "--dtype", "float32", "--quantization", "gguf")
    assert _ours(folder).greedy(prompts, 12) == models.reference_greedy(theirs, prompts, 12)


def test_two_ranks_and_two_steps_give_the_same_weights_and_tokenizer(trimaran, tmp_path, built):
    written = write_gguf(tmp_path / "model.gguf", "Q4_0")
    at_once = built(written.path, "--tp-size", "2")
    for words in (
        (
            "convert",
            "--checkpoint",
            written.path,
            "--output",
            tmp_path / "half",
            "--tp-size",
            2,
        ),
        ("build", "--checkpoint", tmp_path / "half", "--output", tmp_path / "other"),
        # Again, in the place of the first.
        ("build", "--checkpoint", tmp_path / "half", "--output", tmp_path / "other"),
    ):
        done = trimaran(*words)
        assert done.code == 0, done.err
    names = (
        "rank0.safetensors",
        "rank1.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    for name in names:
        assert (at_once / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name


def test_the_engine_folder_is_a_tokenizer_folder_with_the_chat_template(tmp_path, built):
    template = "{% for each in messages %}<turn>{{ each['content'] }}</turn>{% endfor %}"
    words = ["<unk>", "<turn>", "</turn>", *sorted(ByteLevel.alphabet()), "he", "Ġhe"]
    types = [3, 3, 3, *(1 for _ in words[3:])]
    values = {
        "merges": ["h e", "Ġ he"], "bos_token_id": 1, "eos_token_id": 2, "pre": "smollm",
        "chat_template": template, "add_bos_token": False,
    }  # fmt: skip
    path = tmp_path / "model.gguf"
    write_gguf(path, vocabulary=Vocabulary("gpt2", words, types, values))
    tokenizer = AutoTokenizer.from_pretrained(built(path))
    messages = [{"role": "user", "content": "he said: the sum of 12 é"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<turn>he said: the sum of 12 é</turn>"
    ids = tokenizer(text)["input_ids"]
    assert (ids[:2], ids[-1]) == ([1, words.index("he")], 2)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "</turn>"


def test_a_file_that_was_changed_is_built_anew(tmp_path, built):
    first = load_file(built(write_gguf(tmp_path / "model.gguf").path) / "rank0.safetensors")
    written = write_gguf(tmp_path / "model.gguf", "Q4_0")
    second = load_file(built(written.path) / "rank0.safetensors")
    assert not first["embed_tokens.weight"].equal(second["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, "attention.sliding_window may change"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count is 16"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.block_count": None}, "the key llama.block_count is missing"),
        ({"llama.block_count": 3}, "do not match its metadata: 9 missing"),
        ({"llama.attention.head_count_kv": [2, 4]}, "has a value for each layer"),
        ({"split.count": 3}, "is one of 3 parts of a model. Merge them"),
        ({"general.architecture": "falcon"}, "general.architecture is 'falcon'"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(keys, words, trimaran, tmp_path):
    path = tmp_path / "model.gguf"
    architecture = keys.pop("general.architecture", "llama")
    write_gguf(path, architecture=architecture, keys=keys)
    done = trimaran("build", "--checkpoint", path, "--output", tmp_path / "engine")
    assert done.code == 2
    assert words in done.err
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"values": {"merges": ["t 1"]}}, "vocabulary cannot be used: "),
        (
            {"values": {"merges": ["t 0"], "pre": "unheard-of"}},
            "tokenizer.ggml.pre is 'unheard-of'",
        ),
        ({"values": {}}, "the key tokenizer.ggml.merges is missing"),
        ({"values": {"merges": ["t 0"], "eos_token_id": 999}}, "eos_token_id is 999 but there"),
    ],
)
def test_a_vocabulary_that_is_not_read_is_refused(vocabulary, words, trimaran, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, vocabulary=Vocabulary(**vocabulary))
    done = trimaran("build", "--checkpoint", path, "--output", tmp_path / "engine")
    assert (done.code, words in done.err) == (2, True), done.err


def test_tensors_of_other_types_and_broken_files_are_refused(trimaran, tmp_path):
    path, output = tmp_path / "model.gguf", tmp_path / "engine"
    write_gguf(path, tensors={"extra.weight": np.zeros(4, dtype=np.float64)})
    done = trimaran("build", "--checkpoint", path, "--output", output)
    assert (done.code, "'extra.weight' is F64, which is not read" in done.err) == (2, True)
    write_gguf(path, tensors={"extra.weight": np.zeros(4, dtype=np.float32)})
    done = trimaran("build", "--checkpoint", path, "--output", output)
    assert (done.code, "1 unexpected (extra.weight)" in done.err) == (2, True)
    write_gguf(path)
    for num_bytes in (0, 3, 40, 2000, path.stat().st_size - 5000):
        broken = tmp_path / f"broken-{num_bytes}.gguf"
        broken.write_bytes(path.read_bytes()[:num_bytes])
        done = trimaran("build", "--checkpoint", broken, "--output", output)
        assert (done.code, "cannot be read as GGUF" in done.err) == (2, True), done.err


def test_a_gguf_file_where_a_folder_is_meant_is_told_what_to_do(trimaran, tmp_path):
    path = write_gguf(tmp_path / "model.gguf").path
    for words in (("quantize", "--checkpoint", path), ("quantize", "--checkpoint", tmp_path)):
        done = trimaran(*words, "--output", tmp_path / "engine")
        assert done.code == 2
        assert "trimaran build --checkpoint" in done.err
