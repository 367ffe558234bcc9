"""Valid and invalid products of tensor, pipeline, data and expert sizes."""

from __future__ import annotations

import json

import pytest
from launcher_repository import HUGGINGFACE, write_engine

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.config.parallel_sizes import RequestedSizes, expert_sizes, layout_of

MIXTURE = {
    **HUGGINGFACE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def mixture(tmp_path):
    """A Hugging Face folder with 8 experts, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    return EngineFolder.load(tmp_path, check_weights=False)


def sizes_of(layout):
    return (
        layout.tp_size, layout.pp_size, layout.dp_size, layout.moe_tp_size, layout.moe_ep_size,
        layout.expert_dp_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("requested", "sizes"),
    [
        ({}, (1, 1, 1, 1, 1, 1)),
        ({"world_size": 4}, (4, 1, 1, 4, 1, 1)),
        ({"pp_size": 2}, (1, 2, 1, 1, 1, 1)),
        ({"world_size": 4, "pp_size": 2}, (2, 2, 1, 2, 1, 1)),
        ({"tp_size": 2, "moe_ep_size": 2}, (2, 1, 1, 1, 2, 1)),
        ({"tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 2}, (4, 1, 1, 2, 2, 1)),
        ({"dp_size": 2}, (1, 1, 2, 1, 1, 1)),
        ({"dp_size": 2, "moe_ep_size": 2}, (1, 1, 2, 1, 2, 2)),
        ({"world_size": 4, "dp_size": 2, "moe_ep_size": 4}, (2, 1, 2, 1, 4, 2)),
        ({"tp_size": 2, "dp_size": 2, "moe_tp_size": 2, "moe_ep_size": 2}, (2, 1, 2, 2, 2, 2)),
        ({"tp_size": 2, "dp_size": 2, "moe_ep_size": 2}, (2, 1, 2, 1, 2, 1)),
        ({"world_size": 8, "pp_size": 2, "dp_size": 2}, (2, 2, 2, 2, 1, 1)),
    ],
)
def test_omitted_parallel_sizes_follow_from_the_given_sizes(mixture, requested, sizes):
    assert sizes_of(layout_of(RequestedSizes(**requested), mixture)) == sizes


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        ({"world_size": 3, "pp_size": 2}, r"world size of 3 is no multiple of --pp-size \(2\)"),
        ({"world_size": 4, "tp_size": 4, "dp_size": 2}, r"is 4 but .* dp_size \(2\) is 8"),
        (
            {"tp_size": 2, "moe_ep_size": 4},
            r"ep-size \(4\) must divide --tp-size \(2\)\. Leave",
        ),
        ({"dp_size": 2, "moe_ep_size": 4}, r"or that times --dp-size \(2\)\. Leave it out"),
        ({"dp_size": 3, "moe_ep_size": 3}, r"num_experts \(8\) is not a multiple of .* \(3\)"),
        ({"pp_size": 4}, r"pp_size \(4\) is above num_hidden_layers \(3\)"),
        ({"tp_size": 5}, r"tp_size \(5\) is above num_attention_heads \(4\)"),
        ({"dp_size": 2, "moe_tp_size": 0}, "--moe-tp-size is 0"),
        ({"dp_size": 4097}, "times dp_size 4097 is 4097 ranks, but at most 4096 work together"),
        ({"dp_size": 4097, "moe_tp_size": 4097}, "is 4097 ranks, but at most 4096"),
    ],
)
def test_parallel_sizes_that_do_not_multiply_to_the_world_size_are_refused(
    mixture, requested, words
):
    with pytest.raises(ConfigError, match=words):
        layout_of(RequestedSizes(**requested), mixture)


def test_an_engine_folder_serves_with_dp_ranks_added_to_its_parallel_sizes(tmp_path):
    folder = EngineFolder.load(write_engine(tmp_path / "e", tp_size=2), check_weights=False)

    assert sizes_of(layout_of(RequestedSizes(dp_size=3), folder))[:3] == (2, 1, 3)
    assert [folder.shard_of(rank).name for rank in (0, 3, 4)] == [
        "rank0.safetensors", "rank1.safetensors", "rank0.safetensors",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"is 4 but .* dp_size \(3\) is 6"):
        layout_of(RequestedSizes(world_size=4, dp_size=3), folder)
    with pytest.raises(ConfigError, match=r"built for tp_size 2 .*Start 2 ranks"):
        layout_of(RequestedSizes(world_size=4), folder)
    for requested in (RequestedSizes(tp_size=1), RequestedSizes(world_size=3, pp_size=3)):
        with pytest.raises(ConfigError, match=r"built for tp_size 2 .*asked to run"):
            layout_of(requested, folder)


def test_an_engine_folder_with_experts_divided_between_dp_ranks_needs_its_number_of_dp_ranks(
    tmp_path,
):
    path = write_engine(tmp_path / "e", tp_size=1)
    values = json.loads((path / "config.json").read_text())
    pretrained = values["pretrained_config"]
    pretrained["mapping"] |= {"dp_size": 2, "moe_ep_size": 2, "world_size": 2}
    pretrained |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                   "architecture": "MixtralForCausalLM"}  # fmt: skip
    (path / "config.json").write_text(json.dumps(values))
    folder = EngineFolder.load(path, check_weights=False)

    assert sizes_of(layout_of(RequestedSizes(), folder)) == (1, 1, 2, 1, 2, 2)
    for dp_size in (1, 4):
        words = (
            rf"built for experts shared over 2 dp rank\(s\), but .* with dp_size {dp_size}\."
        )
        with pytest.raises(ConfigError, match=words):
            layout_of(RequestedSizes(dp_size=dp_size), folder)
    with pytest.raises(ConfigError, match=r"pp_size 1 in each of 2 dp ranks \(world size 2\)"):
        layout_of(RequestedSizes(world_size=3), folder)


@pytest.mark.parametrize(
    ("requested", "sizes"),
    [((-1, -1), (4, 1)), ((2, -1), (2, 2)), ((-1, 4), (1, 4)), ((2, 2), (2, 2))],
)
def test_expert_parallel_sizes_multiply_to_the_tensor_parallel_size(requested, sizes):
    assert expert_sizes(*requested, 4) == sizes


@pytest.mark.parametrize(
    ("requested", "words"), [((2, 4), r"\(2\) times .* \(4\) must be --tp-size \(4\)"),
                         ((0, -1), "--moe-tp-size is 0"),
                         ((3, -1), r"--moe-tp-size \(3\) must divide --tp-size \(4\)\.")],
)  # fmt: skip
def test_expert_parallel_sizes_that_do_not_multiply_to_the_tensor_parallel_size_are_refused(
    requested, words
):
    with pytest.raises(ConfigError, match=words):
        expert_sizes(*requested, 4)
