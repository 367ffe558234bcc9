"""Builds with a quantized KV cache: flags, calibrated scales, scales of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.kv_cache_dtype import KVScales
from trimaran.worker.models.weights.kv_scales import folder_kv_scales

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture
def base():
    """A small model with a tokenizer."""
    return Path(__file__).parents[3] / "examples" / "demo_models" / "base"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@torch.inference_mode()
def peaks_of(folder, ids):
    """The largest keys and values of each layer's heads, by transformers."""
    cache = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        torch.tensor([ids]), use_cache=True
    ).past_key_values
    return [
        [x[0].abs().amax((1, 2)).tolist() for x in (layer.keys, layer.values)]
        for layer in cache.layers
    ]


@pytest.mark.parametrize(("kind", "largest"), [("fp8", 448), ("int8", 127)])
def test_calibrated_scales_are_the_largest_keys_and_values_of_each_head(
    base, text, kind, largest, trimaran, tmp_path
):
    engine = tmp_path / "engine"
    done = trimaran(
        "build", "--checkpoint", base, "--output", engine, "--dtype", "float32",
        f"--{kind}_kv_cache", "--calib_dataset", text, "--calib_size", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"KV cache scales ({kind}) from" in done.out

    folder, scales = EngineFolder.load(engine), KVScales.read(engine)
    assert folder.config.kv_cache_quant_algo == kind.upper()
    section = json.loads((engine / "config.json").read_text())["pretrained_config"]
    assert section["quantization"]["kv_cache_quant_algo"] == kind.upper()
    ids = prepare(base).fast().encode(TEXT).ids[:512]
    for number, (keys, values) in enumerate(peaks_of(base, ids)):
        found = scales.layers[number]
        assert found[0] == pytest.approx([peak / largest for peak in keys], rel=1e-3)
        assert found[1] == pytest.approx([peak / largest for peak in values], rel=1e-3)


def test_a_converted_checkpoint_hands_its_scales_to_the_engine(base, text, trimaran, tmp_path):
    middle, engine = tmp_path / "checkpoint", tmp_path / "engine"
    done = trimaran(
        "convert", "--checkpoint", base, "--output", middle, "--int8_kv_cache",
        "--calib_dataset", text, "--calib_size", "1",
    )  # fmt: skip
    assert done.code == 0, done.err
    done = trimaran("build", "--checkpoint", middle, "--output", engine)
    assert done.code == 0, done.err
    assert KVScales.read(engine) == KVScales.read(middle)
    # Another build with the model's own cache leaves none behind.
    done = trimaran("build", "--checkpoint", base, "--output", engine)
    assert done.code == 0, done.err
    assert KVScales.read(engine) is None


SCHEMES = {
    "compressed-tensors": (
        {"quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor",
                                "dynamic": False, "symmetric": True}}},
        ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"),
    ),
    "modelopt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": None,
                                 "kv_cache_quant_algo": "FP8"}},
        ("model.layers.{}.self_attn.k_proj.k_scale",
         "model.layers.{}.self_attn.v_proj.v_scale"),
    ),
    "older": (
        {"quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
        ("model.layers.{}.self_attn.k_proj.output_scale",
         "model.layers.{}.self_attn.v_proj.output_scale"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SCHEMES)
def test_the_scales_of_a_checkpoint_are_those_of_its_engine(form, llama, trimaran, tmp_path):
    checkpoint = llama()
    values, names = SCHEMES[form]
    checkpoint.edit_config(**values)
    layers = EngineFolder.load(checkpoint.folder).config.num_hidden_layers
    expected = {}
    for layer in range(layers):
        pair = (0.25 + layer, 0.5 + layer)
        expected[layer] = tuple((scale,) for scale in pair)
        for name, scale in zip(names, pair, strict=True):
            checkpoint.tensors[name.format(layer)] = torch.tensor([scale])
    checkpoint.save()

    found = folder_kv_scales(EngineFolder.load(checkpoint.folder))
    engine = tmp_path / "engine"
    done = trimaran("build", "--checkpoint", checkpoint.folder, "--output", engine)

    assert done.code == 0, done.err
    assert found == KVScales.read(engine) == KVScales("fp8", expected)
    assert EngineFolder.load(engine).config.kv_cache_quant_algo == "FP8"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--int8_kv_cache"], ["INT8 needs scales", "--calib_dataset FILE"]),
        (["--fp8_kv_cache", "--calib_dataset", "cnn_dailymail"], ["cnn_dailymail", "text"]),
        (["--kv-cache-dtype", "float16"], ["runs in float32", "fp8, int8"]),
    ],
)
def test_impossible_kv_caches_are_refused(flags, words, base, refused):
    error = refused(base, "--dtype", "float32", *flags)
    for word in words:
        assert word in error


def test_a_damaged_file_of_scales_is_refused(tmp_path):
    (tmp_path / "kv_cache_scales.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as scales"):
        KVScales.read(tmp_path)
    scales = KVScales("fp8", {0: ((1.0, 2.0), (0.0,))})
    with pytest.raises(ConfigError, match=r"layer 0 has 2 scales .* one for each of 4 heads"):
        scales.check(1, 4, "here")
    with pytest.raises(ConfigError, match="must be a positive number"):
        KVScales("fp8", {0: ((1.0,), (0.0,))}).check(1, 4, "here")
    with pytest.raises(ConfigError, match="layer 1 of 2 has no scales"):
        KVScales("fp8", {0: ((1.0,), (1.0,))}).check(2, 4, "here")
