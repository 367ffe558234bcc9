"""Which steps are captured, and that what cannot be captured is refused."""

import pytest

from trimaran.comm.collectives import SingleRankGroup
from trimaran.comm.control import LocalControlPlane
from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config import EngineConfig, RankConfig
from trimaran.worker.cuda_graphs import graph_sizes, prompt_graph_sizes
from trimaran.worker.engine import Engine


def test_the_largest_decode_is_captured_whatever_its_size():
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(300)[-3:] == [256, 288, 300]
    assert graph_sizes(300, 2) == [1, 2]


def test_steps_with_prompts_are_captured_up_to_the_number_of_tokens_that_is_given():
    assert prompt_graph_sizes(0) == []
    assert prompt_graph_sizes(10) == [10]
    assert prompt_graph_sizes(150) == [16, 32, 64, 128, 150]
    assert prompt_graph_sizes(192) == [16, 32, 64, 128, 192]


def test_a_cpu_refuses_to_capture_steps_with_prompts(model_folder):
    config = EngineConfig(
        model="test", engine_dir=str(model_folder), device="cpu", prompt_graph_tokens=512
    )
    engine = Engine(
        RankConfig(engine=config, group="test"),
        ParallelLayout(),
        LocalControlPlane(),
        SingleRankGroup(),
    )
    with pytest.raises(
        ConfigError, match=r"prompt-graph-tokens is 512 but the device is cpu.*Serve without"
    ):
        engine.load()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"all_reduce": "ring"}, "all_reduce is 'ring' but must be nccl or peer"),
        ({"all_reduce": "peer"}, "--all-reduce peer is about sums between GPUs.*Leave it out"),
        ({"collective_graphs": True}, "--collective-graphs is about .* the device is cpu"),
    ],
)
def test_what_only_gpus_sum_is_refused_on_the_cpu(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(model="test", engine_dir="/m", device="cpu", **changes)
