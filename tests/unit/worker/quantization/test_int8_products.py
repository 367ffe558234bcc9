"""Layers whose weights and inputs are INT8, where the device multiplies INT8 by INT8."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.models import models
from tests.unit.worker.quantization import integer_checkpoints
from tests.unit.worker.quantization.integer_checkpoints import FORMS
from trimaran.comm.errors import ConfigError
from trimaran.kernels.gpu import TritonOps
from trimaran.kernels.quantized import ByteRows
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.quantization import load_time_quantization
from trimaran.worker.models.interfaces import StageRange
from trimaran.worker.models.quantized_layers import finish_weights
from trimaran.worker.models.registry import build_model
from trimaran.worker.models.weights.weight_loader import load_checkpoint
from trimaran.worker.parallel.tensor_parallel import ShardPosition
from trimaran.worker.quantization import self_check

CONFIG = models.llama_config(
    hidden_size=72, intermediate_size=104, head_dim=12, attention_bias=True,
    num_hidden_layers=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Triton's interpreter takes some milliseconds for each row of a check."""
    monkeypatch.setattr(self_check, "_ROWS", (1, 21))


LAYERS = ("attention.qkv_proj", "attention.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def finished(folder, ops, rank=0, size=1, name="none"):
    source = EngineFolder.load(folder).quantized(name)
    stage = StageRange.of(source.config.num_hidden_layers, 0, 1)
    model = build_model(
        source.config, stage, ShardPosition(rank, size), dtype=torch.float32,
        device=models.CPU, ops=ops,
    )  # fmt: skip
    load_checkpoint(model, source.weight_files)
    finish_weights(model)
    return model


def products(model, other):
    """The local products of both models' layers on the same inputs."""
    for path in LAYERS:
        layer, its = (each.get_submodule(f"layers.0.{path}") for each in (model, other))
        for rows in (1, 21):
            x = torch.randn((rows, layer.input_partition.size))
            yield path, layer._product(x, None), its._product(x, None)


@pytest.mark.parametrize("name", ["plain-bytes", "plain-static-bytes"])
@pytest.mark.parametrize("size", [1, 2])
def test_products_of_int8_are_those_of_the_definition_on_every_rank(name, size, tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS[name], CONFIG)
    for rank in range(size):
        ours = finished(folder, TritonOps(), rank, size)
        defined = finished(folder, None, rank, size)
        layer = ours.get_submodule("layers.0.mlp.down_proj")
        assert layer.own_product is not None and layer.integer_product is None
        assert layer.weight.numel() > 0
        for path, found, expected in products(ours, defined):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=path)


def test_norms_and_activations_make_the_inputs_of_int8_products(tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS["plain-bytes"], CONFIG)
    ours, defined = finished(folder, TritonOps(), 0, 1), finished(folder, None)
    layer, its = (each.get_submodule("layers.0") for each in (ours, defined))
    x, residual = torch.randn((70, 72)), torch.randn((70, 72))
    rows, _ = layer.mlp_norm.forward_to(layer.mlp.gate_up_proj, x, residual.clone())
    assert isinstance(rows, ByteRows) and rows.values.dtype is torch.int8
    normed, _ = its.mlp_norm.forward_to(its.mlp.gate_up_proj, x, residual.clone())
    found, expected = layer.mlp.forward(rows, None), its.mlp.forward(normed, None)
    # An input of the second product may be the neighbouring byte.
    assert (found - expected).norm() < 2e-2 * expected.norm()


@pytest.mark.parametrize("form", ["plain-8-bits", "gptq-8-bits-rows"])
def test_weights_whose_inputs_stay_floats_keep_their_product(form, tmp_path):
    folder = integer_checkpoints.make(tmp_path, FORMS[form], CONFIG)
    layer = finished(folder, TritonOps()).get_submodule("layers.0.mlp.down_proj")
    assert layer.own_product is None and layer.integer_product is not None


def test_floats_are_quantized_to_int8_weights_and_inputs_as_they_are_loaded(tmp_path):
    models.save_huggingface(tmp_path, CONFIG)
    ours = finished(tmp_path, TritonOps(), name="w8a8_int8")
    floats = models.load_ours(tmp_path)
    assert ours.get_submodule("layers.0.mlp.down_proj").own_product is not None
    for path, found, expected in products(ours, floats):
        assert (found - expected).norm() < 0.02 * expected.norm(), path
    assert load_time_quantization("w8a8_int8").head_bits == 0
    (rule,) = load_time_quantization("w8a8_int8").rules
    assert rule.scheme.algorithm == "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"


def test_a_product_that_differs_from_its_definition_is_refused(tmp_path):
    class Wrong(TritonOps):
        def int8_product(self, weight, inputs):
            return super().int8_product(weight._replace(scales=2 * weight.scales), inputs)

    folder = integer_checkpoints.make(tmp_path, FORMS["plain-bytes"], CONFIG)
    with pytest.raises(ConfigError, match=r"INT8 weights .* off its definition"):
        finished(folder, Wrong())
