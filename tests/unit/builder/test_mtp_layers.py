"""A build takes the layer for multi-token prediction out of the model's checkpoint."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.worker.quantization.checkpoints import quantize_folder
from tests.unit.worker.speculation.mtp_reference import write_deepseek
from tests.unit.worker.speculation.test_networks import count_with, make_engine
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.speculation_config import SpeculationConfig

MTP = ("--speculative_decoding_mode", "mtp")
PROMPTS = [[5, 6, 7], [40, 2, 100, 33, 9, 8, 7, 6, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small DeepSeek V3 with the layer."""
    return write_deepseek(tmp_path_factory.mktemp("deepseek"))


def drafted(engine_dir, draft_dir, **fields):
    """Outputs and counts of an engine that drafts with the layer in ``draft_dir``."""
    drafter = SpeculationConfig(
        drafter="mtp", draft_dir=str(draft_dir), max_draft_tokens=2, is_adaptive=False
    )
    outputs, counts = count_with(make_engine(engine_dir, drafter, **fields), PROMPTS, 20)
    return outputs, (counts.num_drafts, counts.num_tokens, counts.num_accepted)


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize("form", [None, "fp8-blocks"])
@pytest.mark.parametrize(("flags", "most"), [((), 1), (("--max_draft_len", "2"), 2)])
def test_a_built_engine_drafts_as_its_checkpoint_does(
    folder, trimaran, tmp_path, flags, most, form
):
    if form is not None:
        folder = shutil.copytree(folder, tmp_path / "quantized")
        quantize_folder(folder, form)
    output = tmp_path / "engine"
    done = trimaran("build", "--checkpoint", folder, "--output", output, *MTP, *flags)
    assert done.code == 0, done.err

    build = EngineFolder.load(output).build
    assert (build.speculative_decoding_mode, build.max_draft_len) == ("mtp", most)
    own = drafted(output, output / "draft_head")
    assert own == drafted(folder, folder)
    assert own[1][2]


def change(folder, copy, edit):
    """A copy of a folder, with the tensors that ``edit`` makes of its tensors."""
    shutil.copytree(folder, copy)
    path = copy / "model.safetensors"
    save_file(edit(load_file(path)), path, {"format": "pt"})
    return copy


def test_checkpoints_without_the_layer_are_refused(folder, refused, llama, tmp_path):
    error = refused(llama().folder, *MTP)
    assert "served for DeepseekV3ForCausalLM, but the target is a LlamaForCausalLM" in error

    def without_layer(tensors):
        return {name: each for name, each in tensors.items() if "layers.3." not in name}

    def with_two(tensors):
        return {**tensors, "model.layers.4.enorm.weight": torch.ones(96)}

    def of_another_width(tensors):
        return {**tensors, "model.layers.3.eh_proj.weight": torch.ones(96, 96)}

    def incomplete(tensors):
        return {name: each for name, each in tensors.items() if "3.hnorm" not in name}

    for number, (edit, complaint) in enumerate(
        [
            (without_layer, "has no tensors model.layers.3.*"),
            (with_two, "holds several layers for multi-token prediction"),
            (of_another_width, "'model.layers.3.eh_proj.weight' has shape [96, 96]"),
            (incomplete, "1 missing (layers.3.hnorm.weight)"),
        ]
    ):
        copy = change(folder, tmp_path / str(number), edit)
        assert complaint in refused(copy, *MTP)


def test_stages_have_one_layer_together(folder, trimaran, tmp_path):
    layers = []
    for stages in ("1", "2"):
        output = tmp_path / stages
        own = ("--checkpoint", folder, "--output", output, "--pp-size", stages)
        assert trimaran("build", *own, *MTP).code == 0
        (path,) = (output / "draft_head").glob("*.safetensors")
        layers.append(load_file(path))

    one, two = layers
    assert one.keys() == two.keys()
    assert all(tensor.equal(two[name]) for name, tensor in one.items())
