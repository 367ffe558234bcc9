"""Checkpoints that other tools made: our weights equal the tools', served and built.

Tools for GPTQ and AWQ are not among them: GPTQModel needs a newer torch and protobuf than this
project has, AutoGPTQ and AutoAWQ are not maintained. Their layouts are written by
`tests.unit.worker.quantization.integer_checkpoints`, that of ``fbgemm_fp8``, whose tool needs a
GPU, by `tests.unit.worker.quantization.checkpoints`.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.unit.builder.test_quantized import _build, _check_shards
from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun
from tests.unit.worker.quantization import tool_checkpoints
from tests.unit.worker.quantization.dequantized import linear_weights
from trimaran.worker.config.engine_folder import EngineFolder

CONFIG = models.llama_config(
    hidden_size=72, intermediate_size=104, head_dim=12, num_hidden_layers=2
)
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="compressed-tensors needs Python 3.11"
)
TOOLS = {
    "compressed": (tool_checkpoints.compressed, tool_checkpoints.COMPRESSED),
    "transformers": (tool_checkpoints.transformers_fp8, tool_checkpoints.TRANSFORMERS),
    "modelopt": (tool_checkpoints.modelopt, tool_checkpoints.MODELOPT),
}

# The import of ModelOpt alone takes ten times as long as a case.
_MARKS = {"modelopt": pytest.mark.matrix(keep=0)}


def _forms(*tools):
    return [
        pytest.param((tool, name), marks=_MARKS.get(tool, ()), id=f"{tool}-{name}")
        for tool in tools
        for name in TOOLS[tool][1]
    ]


RUNNABLE = ("compressed", "modelopt")
"""transformers runs its FP8 models on GPUs alone."""


@pytest.fixture(scope="module", params=_forms(*TOOLS))
def made(request, tmp_path_factory):
    """A checkpoint of each tool and format."""
    tool, name = request.param
    return TOOLS[tool][0](tmp_path_factory.mktemp(tool), name, CONFIG)


@pytest.mark.matrix(keep=6)
def test_weights_equal_those_that_the_tool_dequantizes_to_the_bit(made):
    quantization = EngineFolder.load(made.folder).config.quantization
    # Integers are unpacked before the products take them.
    ours = models.load_ours(made.folder, is_finished=not quantization.has_integers)
    found = dict(linear_weights(ours))
    assert found.keys() == made.weights.keys()
    for name, weight in found.items():
        assert weight.equal(made.weights[name]), name


@pytest.mark.matrix(keep=10)
@pytest.mark.parametrize("flags", ["--tp-size 1", "--tp-size 3"])
def test_a_build_holds_what_a_rank_cuts_from_the_checkpoint(made, flags, tmp_path, trimaran):
    source = EngineFolder.load(made.folder)
    built = _build(trimaran, made.folder, tmp_path / "engine", *flags.split())
    _check_shards(built, source)


@torch.inference_mode()
@pytest.mark.parametrize("made", _forms(*RUNNABLE), indirect=True)
@pytest.mark.parametrize("ops", list(OPS))
def test_logits_are_as_near_to_floats_as_those_of_the_tools_own_model(made, ops):
    ours = models.load_ours(made.folder, ops=OPS[ops](torch.float32))
    plain = models.load_huggingface(made.folder.parent / "floats", CONFIG)
    for name, weight in made.weights.items():
        plain.get_submodule(name).weight.copy_(weight)

    logits = PagedRun(ours, 1).logits({0: tool_checkpoints.PROMPT})

    unquantized = plain(torch.tensor([tool_checkpoints.PROMPT])).logits[0]
    distance = (logits - unquantized).abs().max()
    theirs = (made.logits - unquantized).abs().max()
    # Weights alone are quantized where the tool's logits are those of floats.
    assert distance <= 1.5 * theirs + 1e-4 * unquantized.std()
