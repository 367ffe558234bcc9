"""Which steps are captured, and refusals of settings that cannot be."""

import pytest
import torch

from trimaran.comm.collectives.tensor_group import SingleRankGroup
from trimaran.comm.control.control_plane import LocalControlPlane
from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import (
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    RankConfig,
    SchedulerConfig,
)
from trimaran.worker.config.parallel_sizes import expert_sizes
from trimaran.worker.engine.engine import Engine
from trimaran.worker.execution.cuda_graphs import (
    LONGEST_DECODE,
    MAX_DECODES,
    choose_graphs,
    fits_prompt_graph,
    graph_sizes,
    prompt_graph_sizes,
)
from trimaran.worker.steps.step_types import SchedulerOutput, int32s


def test_the_largest_decode_batch_is_captured_at_any_size():
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
    rank = RankConfig(engine=config, group="test")
    with pytest.raises(
        ConfigError, match=r"prompt-graph-tokens is 512 but the device is cpu.*Serve without"
    ):
        Engine.load(rank, ParallelLayout(), LocalControlPlane(), SingleRankGroup())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"all_reduce": "ring"},
            "all_reduce is 'ring' but must be one of auto, nccl, peer, fused",
        ),
        ({"all_reduce": "peer"}, "--all-reduce peer is about sums between GPUs.*Leave it out"),
        ({"all_reduce": "fused"}, "--all-reduce fused is about sums between GPUs"),
        ({"collective_graphs": True}, "--collective-graphs is about .* the device is cpu"),
        (
            {"device": "cuda", "collective_graphs": True, "cuda_graphs": False},
            "--collective-graphs is set but cuda_graph_mode is false.*Leave one of them out",
        ),
    ],
)
def test_gpu_all_reduce_settings_are_refused_on_the_cpu(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        EngineConfig(**{"model": "test", "engine_dir": "/m", "device": "cpu", **changes})


def layout(tp_size=1, dp_size=1, moe_ep_size=-1, pp_size=1, hosts=()):
    """An engine's parallel configuration, and the layout of a rank."""
    sizes = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": dp_size}
    experts = expert_sizes(-1, moe_ep_size, tp_size, dp_size)
    parallel = ParallelConfig(**sizes, moe_tp_size=experts[0], moe_ep_size=experts[1])
    return parallel, ParallelLayout(**sizes, hosts=hosts)


def choose(ranks, **changes):
    """The largest captured decode and the largest captured step with prompts; 0 without
    capture."""
    parallel, topology = ranks
    config = EngineConfig(
        model="test",
        engine_dir="/m",
        parallel=parallel,
        scheduler=SchedulerConfig(max_num_seqs=200, max_num_batched_tokens=4096),
        **changes,
    )
    device = torch.device(changes.get("device", "cuda"))
    found = choose_graphs(config, topology, device)
    return tuple(max(sizes, default=0) for sizes in found)


DP_RANKS = {"dp_size": 2, "moe_ep_size": 2}
"""Data-parallel ranks that share experts."""


@pytest.mark.parametrize(
    ("ranks", "changes", "expected"),
    [
        ({}, {}, (200, 1024)),
        ({"tp_size": 2}, {}, (200, 1024)),
        ({"pp_size": 2}, {}, (200, 1024)),
        ({"dp_size": 2}, {}, (200, 1024)),
        (DP_RANKS, {}, (128, 0)),
        ({"tp_size": 2, "hosts": ("a", "a")}, {}, (200, 1024)),
        ({"tp_size": 2, "hosts": ("a", "b")}, {}, (0, 0)),
        ({"tp_size": 2, "hosts": ("a", "b")}, {"collective_graphs": True}, (200, 1024)),
        ({"pp_size": 2, "hosts": ("a", "b")}, {}, (200, 1024)),
        ({"dp_size": 2, "hosts": ("a", "b")}, {}, (200, 1024)),
        ({**DP_RANKS, "hosts": ("a", "b")}, {}, (0, 0)),
        ({}, {"collective_graphs": False}, (200, 1024)),
        ({"tp_size": 2}, {"collective_graphs": False}, (0, 0)),
        (DP_RANKS, {"collective_graphs": False}, (0, 0)),
        ({"tp_size": 2}, {"deterministic": True}, (200, 0)),
        ({"tp_size": 2}, {"cuda_graphs": False}, (0, 0)),
        ({}, {"max_cuda_graphs": 3}, (4, 0)),
        ({}, {"max_cuda_graphs": 3, "prompt_graph_tokens": 100}, (4, 100)),
        ({}, {"prompt_graph_tokens": 0}, (200, 0)),
        ({}, {"prompt_graph_tokens": 9999}, (200, 4096)),
        ({"tp_size": 2}, {"device": "cpu"}, (0, 0)),
    ],
)
def test_by_default_every_step_that_supports_capture_is_captured(ranks, changes, expected):
    assert choose(layout(**ranks), **changes) == expected


@pytest.mark.parametrize(
    ("ranks", "changes", "complaint"),
    [
        (DP_RANKS, {}, "is 48 but dp ranks share experts: such steps are not captured then"),
        ({}, {"deterministic": True}, "is 48 but tokens shall be deterministic"),
        ({}, {"cuda_graphs": False}, "is 48 but cuda_graph_mode is false"),
        (
            {"tp_size": 2},
            {"collective_graphs": False},
            "is 48 but tp_size is 2, with --no-coll",
        ),
        ({"tp_size": 2, "hosts": ("a", "b")}, {}, "is 48 but a tensor group on 2 hosts, with"),
    ],
)
def test_prompts_that_cannot_be_captured_are_refused_with_the_reason(ranks, changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        choose(layout(**ranks), prompt_graph_tokens=48, **changes)


def test_adapters_that_cannot_be_captured_are_refused_with_the_reason():
    lora = LoraConfig(has_graphs=True)
    assert choose(layout(tp_size=2), lora=lora) == (200, 1024)
    with pytest.raises(
        ConfigError, match="adapter-graphs is set but tp_size is 2, with --no-c"
    ):
        choose(layout(tp_size=2), lora=lora, collective_graphs=False)


@pytest.mark.parametrize(
    ("computed", "num_decodes", "expected"),
    [
        ((), 0, True),
        ((9000,), 0, True),
        ((100, LONGEST_DECODE - 1, 9000), 2, True),
        ((LONGEST_DECODE, 0), 1, False),
        ((100,) * MAX_DECODES + (0,), MAX_DECODES, True),
        ((100,) * (MAX_DECODES + 1) + (0,), MAX_DECODES + 1, False),
    ],
)
def test_decodes_that_are_long_or_many_keep_the_decode_kernel_beside_prompts(
    computed, num_decodes, expected
):
    step = SchedulerOutput(
        step=1,
        rows=int32s(range(len(computed))),
        num_scheduled_tokens=int32s([1] * len(computed)),
        num_computed_tokens=int32s(computed),
        sampled=int32s(()),
        new_blocks=int32s((), 4),
        block_copies=int32s((), 3),
        finished_rows=int32s(()),
        new_rows=[],
        num_decodes=num_decodes,
    )
    assert fits_prompt_graph(step) is expected
