"""Models with FP8 weights: against transformers, against an emulation, and over ranks."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.worker.models import models
from tests.unit.worker.models.conftest import OPS
from tests.unit.worker.models.paged_run import PagedRun, logits_alone_and_beside
from tests.unit.worker.quantization import checkpoints
from tests.unit.worker.quantization.checkpoints import FORMATS
from tests.unit.worker.quantization.dequantized import floats_of
from tests.unit.worker.quantization.emulation import emulate
from trimaran.comm.errors import ConfigError
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.parallel.tensor_parallel import ShardPosition

CONFIG = models.llama_config(
    hidden_size=72, intermediate_size=104, head_dim=12, attention_bias=True
)


@pytest.fixture(params=list(FORMATS))
def form(request):
    return request.param


@pytest.fixture(params=list(OPS))
def ops(request):
    return OPS[request.param](torch.float32)


@torch.inference_mode()
def test_logits_and_greedy_tokens_are_those_of_an_emulation(form, ops, tmp_path):
    folder = checkpoints.make(tmp_path, form, CONFIG)
    checkpoints.dequantize_folder(folder, tmp_path / "floats")
    theirs = models.load_huggingface(tmp_path / "floats", CONFIG)
    plain = models.load_huggingface(tmp_path / "floats", CONFIG)
    emulate(theirs, form)
    ours = models.load_ours(folder, ops=ops)
    (prompt,) = models.prompts(40)

    logits = PagedRun(ours, 1).logits({0: prompt})

    expected = theirs(torch.tensor([prompt])).logits[0]
    unquantized = plain(torch.tensor([prompt])).logits[0]
    # Sums in another order may round an input to the neighbouring FP8 number.
    distance = (logits - unquantized).abs().max()
    assert distance <= 1.5 * (expected - unquantized).abs().max()
    assert (logits - expected).abs().median() < 0.02 * expected.std()
    margins = expected.topk(2).values.diff().abs().flatten()
    is_clear = margins > 2 * (logits - expected).abs().max()
    assert is_clear.any()
    assert logits.argmax(1)[is_clear].equal(expected.argmax(1)[is_clear])


@torch.inference_mode()
def test_a_token_does_not_depend_on_other_tokens_of_its_step(form, tmp_path):
    folder = checkpoints.make(tmp_path, form, CONFIG)
    ours = models.load_ours(folder, ops=OPS["cpu kernels"](torch.float32))

    alone, beside = logits_alone_and_beside(ours)

    assert alone.equal(beside)


def shares_of(folder, size, config=CONFIG):
    """The models of all ranks of a tensor group."""
    return [models.load_ours(folder, tp=ShardPosition(rank, size)) for rank in range(size)]


@pytest.mark.matrix(keep=12)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_together_hold_the_weights_of_a_single_rank(form, size, tmp_path):
    folder = checkpoints.make(tmp_path, form, CONFIG)
    (whole,), ranks = shares_of(folder, 1), shares_of(folder, size)
    for path, layer in whole.named_modules():
        if not isinstance(layer, ParallelLinear):
            continue
        for rank in ranks:
            mine = rank.get_submodule(path)
            assert type(mine.method) is type(layer.method)
            found, expected = floats_of(mine), floats_of(layer)
            columns = mine.input_partition
            for name, part in mine.output_parts.items():
                partition, offset = part.partition, layer.output_parts[name].offset
                rows = expected[offset + partition.first :][: partition.count]
                rows = rows[:, columns.first :][:, : columns.count]
                block = found[part.offset :][: partition.size]
                assert block[: partition.count, : columns.count].equal(rows), (path, name)
                assert not block[partition.count :].any()
                assert not block[:, columns.count :].any()


def test_a_layer_that_is_excluded_keeps_its_dtype(tmp_path):
    ours = models.load_ours(checkpoints.make(tmp_path, "modelopt-static", CONFIG))
    dtypes = {
        path: layer.weight.dtype
        for path, layer in ours.named_modules()
        if isinstance(layer, ParallelLinear)
    }
    assert dtypes.pop("layers.1.attention.qkv_proj") == torch.float32
    assert dtypes.pop("layers.1.attention.o_proj") == torch.float32
    assert set(dtypes.values()) == {torch.float8_e4m3fn}


def test_stacked_matrices_keep_their_scales_and_share_the_largest_input_scale(tmp_path):
    folder = checkpoints.make(tmp_path, "fp8-tensor-static", CONFIG)
    stored = load_file(folder / "model.safetensors")
    layer = models.load_ours(folder).get_submodule("layers.0.attention.qkv_proj")
    names = ("q_proj", "k_proj", "v_proj")
    scales = [stored[f"model.layers.0.self_attn.{name}.weight_scale"] for name in names]
    assert len({float(scale) for scale in scales}) == 3
    assert layer.weight_scale.unique().tolist() == sorted(float(scale) for scale in scales)
    assert layer.byte_product._inputs.scale == pytest.approx(checkpoints.STATIC_SCALE * 1.1)


@pytest.mark.parametrize(
    ("drops", "words"),
    [("weight_scale_inv", "'layers.1.mlp.up_proj.weight_scale' is missing"), ("", "holds F32")],
)
def test_weights_that_contradict_the_quantization_config_are_refused(drops, words, tmp_path):
    from safetensors.torch import save_file

    folder = checkpoints.make(tmp_path, "fp8-blocks", CONFIG)
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    if drops:
        del tensors[f"{layer}.{drops}"]
    else:
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].float()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words):
        models.load_ours(folder)


def test_matrices_of_one_product_must_be_quantized_alike(tmp_path):
    folder = checkpoints.make(tmp_path, "compressed-channel-token", CONFIG)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*layers.2.*k_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"k_proj\.weight not at all"):
        models.load_ours(folder)
