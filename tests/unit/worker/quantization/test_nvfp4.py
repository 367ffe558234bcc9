"""Weights in NVFP4 as ModelOpt and compressed-tensors store them, with inputs as they are."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun
from tests.unit.worker.quantization.integer_checkpoints import compressed
from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import dequantize, pack
from trimaran.kernels.integers import FP4_NUMBERS
from trimaran.worker.layers.experts import Experts
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.parallel.tensor_parallel import ShardPosition

GROUP = 16
CONFIGS = {
    "llama": models.llama_config(),
    "qwen3-moe": models.expert_configs()["qwen3-moe"],
}
_NUMBERS = {"num_bits": 4, "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}
FORMS = {
    "modelopt": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"],
    },
    "compressed": {
        **compressed("nvfp4-pack-quantized", **{**_NUMBERS, "type": "float"}),
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
}  # fmt: skip


def make(folder, form, family):
    """A checkpoint of random FP4 numbers and FP8 scales, and the same weights as floats in
    ``floats``."""
    models.save_huggingface(folder / "floats", CONFIGS[family])
    tensors = load_file(folder / "floats" / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    packed, floats = {}, {}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if "proj" not in name or weight.dim() < 2:
            packed[name] = floats[name] = weight
            continue
        outputs, inner = weight.shape
        codes = torch.randint(0, 16, weight.shape, generator=generator).to(torch.uint8)
        shape = outputs, -(-inner // GROUP)
        scales = (torch.rand(shape, generator=generator) * 200 + 50).to(torch.float8_e4m3fn)
        factor = 0.03 / 255 * (1 + torch.rand((), generator=generator))
        values, is_modelopt = pack(codes, 4), form == "modelopt"
        if is_modelopt:
            packed |= {name: values, f"{layer}.weight_scale_2": factor}
            packed[f"{layer}.input_scale"] = torch.tensor(0.5)
            whole = scales.float() * factor
        else:
            factor = (1 / factor).reshape(1)
            packed |= {f"{layer}.weight_packed": values, f"{layer}.weight_global_scale": factor}
            packed[f"{layer}.input_global_scale"] = torch.tensor([2.0])
            whole = scales.float() / factor
        packed[f"{layer}.weight_scale"] = scales
        numbers = torch.tensor(FP4_NUMBERS)[codes.long()]
        floats[name] = numbers * whole.repeat_interleave(GROUP, 1)[:, :inner]
    save_file(floats, folder / "floats" / "model.safetensors", {"format": "pt"})
    (folder / form).mkdir()
    save_file(packed, folder / form / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "floats" / "config.json").read_text())
    values["quantization_config"] = FORMS[form]
    (folder / form / "config.json").write_text(json.dumps(values))
    return folder / form


@pytest.mark.parametrize(("form", "family"), [("modelopt", "llama"), ("compressed", "llama"),
                                              ("modelopt", "qwen3-moe")])  # fmt: skip
def test_dequantized_weights_equal_the_formats_numbers_to_the_bit(form, family, tmp_path):
    folder = make(tmp_path, form, family)
    ours = models.load_ours(folder, is_finished=False)
    plain = models.load_ours(tmp_path / "floats", is_finished=False)
    count = 0
    for path, module in ours.named_modules():
        expected = plain.get_submodule(path)
        if isinstance(module, ParallelLinear):
            assert module.method.name == "nvfp4"
            assert dequantize(module.method.weight_of(module)).equal(expected.weight), path
            count += 1
        elif isinstance(module, Experts):
            for name in module.matrices:
                found = [dequantize(w) for w in module.method.weights_of(module, name)]
                assert torch.stack(found).equal(getattr(expected, name)), path
            count += 1
    assert count >= 3 * CONFIGS[family].num_hidden_layers


@torch.inference_mode()
@pytest.mark.parametrize("ops", list(OPS))
@pytest.mark.parametrize(
    ("form", "family"), [("modelopt", "llama"), ("compressed", "qwen3-moe")]
)
def test_logits_are_those_of_transformers_on_the_dequantized_weights(
    form, family, ops, tmp_path
):
    folder = make(tmp_path, form, family)
    theirs = models.load_huggingface(tmp_path / "floats", CONFIGS[family])
    (prompt,) = models.prompts(40)
    expected = theirs(torch.tensor([prompt])).logits[0]

    ours = models.load_ours(folder, ops=OPS[ops](torch.float32))
    logits = PagedRun(ours, 1).logits({0: prompt})

    assert (logits - expected).abs().max() < 1e-3 * expected.std()
    assert logits.argmax(1).equal(expected.argmax(1))


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_their_shares_of_matrices(form, tmp_path):
    folder = make(tmp_path, form, "llama")
    for rank in range(2):
        position = ShardPosition(rank, 2)
        mine = models.load_ours(folder, position, is_finished=False)
        plain = models.load_ours(tmp_path / "floats", position, is_finished=False)
        for path in ("layers.1.attention.qkv_proj", "layers.1.mlp.down_proj"):
            layer = mine.get_submodule(path)
            expected = plain.get_submodule(path).weight
            assert dequantize(layer.method.weight_of(layer)).equal(expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_without_its_common_factor_is_refused(form, tmp_path):
    folder = make(tmp_path, form, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    del tensors[name + ("_scale_2" if form == "modelopt" else "_global_scale")]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"down_proj\.weight.* is missing"):
        models.load_ours(folder)


def test_other_groups_than_of_16_inputs_are_refused(tmp_path):
    folder = make(tmp_path, "modelopt", "llama")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="NVFP4 with groups of 32"):
        models.load_ours(folder)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors needs Python 3.11")
@pytest.mark.parametrize("has_inputs", [False, True])
def test_a_checkpoint_of_compressed_tensors_holds_what_the_tool_dequantizes(
    has_inputs, tmp_path
):
    folder, theirs = made_by_the_tool(tmp_path, has_inputs)
    ours = models.load_ours(folder, is_finished=False)
    for number in range(CONFIGS["llama"].num_hidden_layers):
        for name, own in (
            ("self_attn.o_proj", "attention.o_proj"),
            ("mlp.down_proj", "mlp.down_proj"),
        ):
            layer = ours.get_submodule(f"layers.{number}.{own}")
            expected = theirs.get_submodule(f"model.layers.{number}.{name}").weight
            # The tool rounds to bfloat16.
            found = dequantize(layer.method.weight_of(layer), torch.bfloat16)
            assert found.equal(expected.bfloat16()), (number, name)
            assert expected.bfloat16().float().equal(expected)


def made_by_the_tool(folder, has_inputs):
    """A checkpoint of compressed-tensors in NVFP4, and the model that the tool makes of it."""
    with warnings.catch_warnings():
        # Its own imports use what newer versions of other packages call old.
        warnings.simplefilter("ignore")
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            apply_quantization_config,
        )
    model = models.save_huggingface(folder / "floats", CONFIGS["llama"])
    numbers = {**_NUMBERS, "type": "float", "scale_dtype": "torch.float8_e4m3fn"}
    group = {
        "targets": ["Linear"],
        "weights": numbers,
        "input_activations": {**numbers, "dynamic": "local"} if has_inputs else None,
    }
    described = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, described, show_progress=False)
    for layer in [each for each in model.modules() if hasattr(each, "quantization_scheme")]:
        _choose_scales(layer)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / "tool")
    compressor.update_config(str(folder / "tool"))
    compressor.decompress_model(model)
    return folder / "tool", model


@torch.no_grad()
def _choose_scales(layer):
    """Scales of groups by their largest number, and the factor that fits them to FP8."""
    factor = 448 * 6 / layer.weight.abs().max()
    peaks = layer.weight.unflatten(1, (-1, GROUP)).abs().amax(2)
    layer.weight_global_scale.fill_(factor)
    layer.weight_scale.copy_((peaks / 6 * factor).to(torch.float8_e4m3fn))
    if hasattr(layer, "input_global_scale"):
        layer.input_global_scale.fill_(100.0)
