"""Models with integer weights: against transformers, and over ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.dequantized import floats_of, linear_weights
from tests.unit.worker.quantization.integer_checkpoints import FORMS, Form, compressed
from trimaran.comm.errors import ConfigError
from trimaran.kernels.integer_reference import quantize_inputs
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.schemes import IntegerScheme, Layout, Zeros
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import fill_random, load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ShardPosition
from trimaran.worker.quantization.integer_formats import unpacked

CONFIG = models.llama_config(
    hidden_size=72, intermediate_size=104, head_dim=12, attention_bias=True
)


@pytest.fixture(params=list(FORMS))
def form(request):
    return FORMS[request.param]


def loaded(folder, rank=0, size=1):
    """A rank's model whose weights are loaded, before the products take them."""
    source = EngineFolder.load(folder)
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(rank, size), dtype=torch.float32, device=models.CPU
    )
    load_checkpoint(model, source.weight_files)
    return model


def quantize_inputs_of(model, scale=None):
    """Let transformers' linear layers see their inputs as bytes."""

    def quantized(module, args):
        values, scales = quantize_inputs(args[0].flatten(0, -2), scale)
        return ((values.float() * scales).view_as(args[0]),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(quantized)


def test_dequantized_weights_equal_the_formats_numbers_to_the_bit(form, tmp_path):
    folder = integer_checkpoints.make(tmp_path, form, CONFIG)
    expected = load_file(tmp_path / "floats" / "model.safetensors")
    model = loaded(folder)
    found = dict(linear_weights(model))
    assert len(found) == 7 * CONFIG.num_hidden_layers
    for name, weight in found.items():
        assert weight.equal(expected[f"{name}.weight"]), name


@pytest.mark.matrix(keep=12)
@torch.inference_mode()
@pytest.mark.parametrize("ops", list(OPS))
def test_logits_are_those_of_transformers_on_the_dequantized_weights(form, ops, tmp_path):
    folder = integer_checkpoints.make(tmp_path, form, CONFIG)
    theirs = models.load_huggingface(tmp_path / "floats", CONFIG)
    is_static = integer_checkpoints.has_static_inputs(form)
    has_byte_inputs = is_static or "token" in str(form.config)
    if has_byte_inputs:
        scale = torch.tensor(integer_checkpoints.INPUT_SCALE) if is_static else None
        quantize_inputs_of(theirs, scale)
    ours = models.load_ours(folder, ops=OPS[ops](torch.float32))
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0]
    if has_byte_inputs:
        # Sums in another order may round an input to the neighbouring byte.
        assert (logits - expected).abs().median() < 0.01 * expected.std()
    else:
        assert (logits - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_the_model_lacks_may_be_zero(value, tmp_path):
    config = models.llama_config(hidden_size=72, intermediate_size=104, head_dim=12)
    folder = integer_checkpoints.make(tmp_path, FORMS["gptq-desc-act"], config)
    (path,) = EngineFolder.load(folder).weight_files
    tensors = load_file(path)
    # As AutoGPTQ stored a bias for each layer.
    for number in range(config.num_hidden_layers):
        bias = torch.zeros(104, dtype=torch.float16)
        bias[7] = value
        tensors[f"model.layers.{number}.mlp.up_proj.bias"] = bias
    save_file(tensors, path)
    if value:
        with pytest.raises(ConfigError, match=r"3 unexpected .*up_proj\.bias"):
            loaded(folder)
    else:
        assert loaded(folder).layers["0"].mlp.gate_up_proj.bias is None


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["gptq-desc-act", "packed", "plain-bytes", "plain-static-bytes"]
)
def test_a_token_does_not_depend_on_other_tokens_of_its_step(name, tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS[name], CONFIG)
    ours = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))

    alone, beside = logits_alone_and_beside(ours)

    assert alone.equal(beside)


@pytest.mark.matrix(keep=10)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_together_hold_the_weights_of_a_single_rank(form, size, tmp_path):
    folder = integer_checkpoints.make(tmp_path, form, CONFIG)
    whole = loaded(folder)
    for rank in range(size):
        model = loaded(folder, rank, size)
        for path, layer in model.named_modules():
            if not isinstance(layer, ParallelLinear):
                continue
            mine, expected = floats_of(layer), floats_of(whole.get_submodule(path))
            columns = layer.input_partition
            taken = slice(columns.first, columns.first + columns.count)
            for name, part in layer.output_parts.items():
                offset = whole.get_submodule(path).output_parts[name].offset
                rows = expected[offset + part.partition.first :][: part.partition.count]
                found = mine[part.offset : part.offset + part.partition.size, : columns.count]
                assert found[: part.partition.count].equal(rows[:, taken]), path
                assert not found[part.partition.count :].any(), path


def test_layers_that_a_checkpoint_leaves_out_keep_the_models_dtype(tmp_path):
    form = FORMS["gptq"]
    folder = integer_checkpoints.make(tmp_path, form, CONFIG)
    floats = load_file(tmp_path / "floats" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.1.mlp.down_proj"
    kept = {name: each for name, each in tensors.items() if not name.startswith(layer)}
    kept[f"{layer}.weight"] = floats[f"{layer}.weight"]
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    for change in (
        {"dynamic": {r"-:.*layers\.1\.mlp\.down.*": {}}},
        {"modules_to_not_convert": [layer]},
    ):
        values["quantization_config"] = {**form.config, **change}
        (folder / "config.json").write_text(json.dumps(values))
        model = loaded(folder)
        names = {path: each.method.name for path, each in model.named_modules()
                 if isinstance(each, ParallelLinear)}  # fmt: skip
        others = [path for path, name in names.items() if name != "int4"]
        assert others == ["layers.1.mlp.down_proj"]


def _changed(folder, change):
    """Rewrite the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_integers_of_a_layer_that_the_configuration_leaves_out_are_refused(tmp_path):
    form = FORMS["plain-8-bits"]
    folder = integer_checkpoints.make(tmp_path, form, CONFIG)
    values = json.loads((folder / "config.json").read_text())
    layer = "model.layers.1.mlp.down_proj"
    values["quantization_config"] = {**form.config, "ignore": [layer, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=rf"{layer}.weight' holds I8, but config.json"):
        loaded(folder)


def test_stacked_matrices_whose_inputs_have_other_groups_are_refused(tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS["gptq-desc-act"], CONFIG)

    def turn(tensors):
        name = "model.layers.1.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    _changed(folder, turn)
    with pytest.raises(ConfigError, match="put the same inputs into different groups"):
        loaded(folder)


def test_a_weight_with_more_inputs_than_the_configuration_implies_is_refused(tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS["plain-8-bits"], CONFIG)

    def widen(tensors):
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, 16))

    _changed(folder, widen)
    with pytest.raises(ConfigError, match=r"has shape \[72, 120\], but .* implies \[72, 104\]"):
        loaded(folder)


def test_a_zero_point_of_a_whole_packed_matrix_is_read():
    scheme = IntegerScheme(bits=4, group_size=None, zeros=Zeros.POINT, layout=Layout.PACKED)
    zeros = unpacked(scheme, "weight_zero", torch.tensor([-3], dtype=torch.int8))
    assert zeros.equal(torch.tensor([[5]], dtype=torch.int16))


def test_integers_count_as_weights_once_products_hold_them(tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS["packed"], CONFIG)
    stored = loaded(folder).num_weight_bytes
    for ops in OPS.values():
        served = models.load_ours(folder, ops=ops(torch.float32)).num_weight_bytes
        assert stored <= served < 1.2 * stored


def test_the_warm_up_runs_a_layer_of_each_number_of_bits(tmp_path):
    config = models.llama_config(num_hidden_layers=4)
    folder = integer_checkpoints.make(tmp_path, FORMS["gptq"], config)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= {"dynamic": {r"+:.*layers\.2\.": {"bits": 8}}}
    (folder / "config.json").write_text(json.dumps(values))
    source = EngineFolder.load(folder)
    stage = StageRange.of(4, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(), dtype=torch.float32, device=models.CPU
    )
    fill_random(model)
    finish_weights(model)
    with model.one_layer_per_shape():
        assert [number for number, _ in model._stack] == [1, 2, 3]


REFUSED = {
    "3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "version gemv": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
    "checkpoint_format marlin": {
        "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin",
    },
    "static INT8 inputs with a scale by channel": compressed(
        "int-quantized", num_bits=8, strategy="channel",
        inputs={"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False},
    ),
    "inputs with zero points": compressed(
        "int-quantized", num_bits=8, strategy="channel",
        inputs={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True,
                "symmetric": False},
    ),
    "weights of 4 bits with inputs of 8 bits": compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=32,
        inputs={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", list(REFUSED))
def test_what_is_not_served_is_refused_by_name(reason, tmp_path):
    folder = integer_checkpoints.make(tmp_path, Form(REFUSED[reason], "awq"), CONFIG)
    with pytest.raises(ConfigError, match=reason):
        EngineFolder.load(folder)
