"""Which KV cache a folder and a flag ask for together, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trimaran.bench.limits.shapes import pretrained_config
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.kv_cache_dtype import (
    KVScales,
    kv_algorithm,
    resolve_kv_cache_dtype,
    scale_place,
)

FOLDER = Path("model")


def resolve(asked, algorithm="", shape="tiny"):
    config = replace(pretrained_config(shape), kv_cache_quant_algo=algorithm)
    return resolve_kv_cache_dtype(asked, config, FOLDER, "bfloat16")


@pytest.mark.parametrize(
    ("asked", "algorithm", "kind"),
    [
        ("auto", "", "bfloat16"),
        ("auto", "FP8", "fp8"),
        ("auto", "INT8", "int8"),
        ("fp8_e4m3", "", "fp8"),
        ("int8", "FP8", "int8"),
        ("bfloat16", "FP8", "bfloat16"),
    ],
)
def test_the_flag_counts_before_the_folder(asked, algorithm, kind):
    assert resolve(asked, algorithm) == kind


@pytest.mark.parametrize(
    ("asked", "algorithm", "shape", "words"),
    [
        (
            "auto",
            "NVFP4",
            "tiny",
            "to be NVFP4, which is not served.*--kv-cache-dtype bfloat16",
        ),
        ("float16", "", "tiny", "runs in bfloat16.*--dtype float16"),
        ("fp8", "", "tiny_latent", "latent attention.*Name --kv-cache-dtype bfloat16"),
        ("auto", "FP8", "tiny_latent", "kv_cache_quant_algo FP8: latent attention"),
    ],
)
def test_what_is_not_served_is_refused_with_a_remedy(asked, algorithm, shape, words):
    with pytest.raises(ConfigError, match=words):
        resolve(asked, algorithm, shape)


@pytest.mark.parametrize(
    ("section", "algorithm"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "strategy": "attn_head"}}, "INT8"),
        ({"kv_cache_scheme": None}, ""),
        ({"quantization": {"kv_cache_quant_algo": "fp8"}}, "FP8"),
        (
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
            "8 bits, float, a scale by tensor, dynamic or asymmetric",
        ),
        (
            {"kv_cache_scheme": {"num_bits": 4, "type": "float", "strategy": "group"}},
            "4 bits, float, a scale by group, static",
        ),
    ],
)
def test_checkpoints_name_their_cache(section, algorithm, tmp_path):
    assert kv_algorithm(tmp_path, {"quantization_config": section}) == algorithm


def test_the_file_of_modelopt_names_the_cache(tmp_path):
    text = '{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}'
    (tmp_path / "hf_quant_config.json").write_text(text)
    assert kv_algorithm(tmp_path, {}) == "FP8"


def test_scales_are_found_by_name():
    names = {
        "model.layers.3.self_attn.k_scale": (3, "k"),
        "model.layers.12.self_attn.v_proj.v_scale": (12, "v"),
        "layers.0.self_attn.kv_scale": (0, "kv"),
        "model.layers.1.self_attn.k_proj.output_scale": (1, "k"),
        "model.layers.1.self_attn.q_proj.output_scale": None,
        "model.layers.1.self_attn.q_scale": None,
        "model.layers.1.self_attn.k_proj.weight_scale": None,
    }
    assert {name: scale_place(name) for name in names} == names


def test_scales_of_one_kind_fill_the_range_of_the_other():
    scales = KVScales("fp8", {0: ((1.0,), (2.0, 3.0))}).for_kind("int8")
    assert scales.kind == "int8"
    assert scales.layers[0][0] == pytest.approx((448 / 127,))
    assert scales.for_kind("fp8").layers[0][1] == pytest.approx((2.0, 3.0))
