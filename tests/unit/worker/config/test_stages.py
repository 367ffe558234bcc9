"""Layers are split over pipeline stages, evenly or by a list."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_config import EngineConfig, ParallelConfig
from trimaran.worker.config.stages import parse_partition, stage_sizes


@pytest.mark.parametrize(
    ("num_layers", "pp_size", "sizes"),
    [(32, 1, [32]), (32, 2, [16, 16]), (32, 3, [11, 11, 10]), (3, 3, [1, 1, 1])],
)
def test_without_a_layer_list_the_first_stages_take_the_remaining_layers(
    num_layers, pp_size, sizes
):
    assert stage_sizes(num_layers, pp_size) == sizes


def test_a_layer_list_is_taken_unchanged():
    assert stage_sizes(32, 3, parse_partition("10,12, 10")) == [10, 12, 10]


@pytest.mark.parametrize(
    ("pp_size", "partition", "words"),
    [
        (4, (), r"pp_size \(4\) is above num_hidden_layers \(3\)"),
        (2, (1, 1, 1), r"\(1,1,1\) has 3 stages but pp_size is 2.*--pp-size to 3"),
        (2, (2, 2), r"\(2,2\) has 4 layers but num_hidden_layers is 3.*--pp-partition"),
        (2, (3, 0), r"\(3,0\) has an empty stage"),
    ],
)
def test_layer_lists_that_do_not_match_the_model_are_refused(pp_size, partition, words):
    with pytest.raises(ConfigError, match=words):
        stage_sizes(3, pp_size, partition)


@pytest.mark.parametrize("text", ["", "a,b", "2,-1", "1.5,2", "0,3", "2," + "9" * 5000])
def test_a_layer_list_with_anything_but_numbers_is_refused(text):
    with pytest.raises(ConfigError, match="as in 14,12,14"):
        parse_partition(text)


def test_every_rank_gets_the_layer_list_unchanged():
    parallel = ParallelConfig(pp_size=2, pp_partition=(1, 2))
    config = EngineConfig(model="m", engine_dir="e", parallel=parallel)
    wire = config.to_wire()
    wire["parallel"]["pp_partition"] = list(wire["parallel"]["pp_partition"])  # as msgpack does
    assert EngineConfig.from_wire(wire) == config
