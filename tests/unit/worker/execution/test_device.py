"""A rank's device, and refusals of devices that do not exist."""

from __future__ import annotations

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.comm.topology import ParallelLayout
from trimaran.worker.config.engine_config import EngineConfig
from trimaran.worker.execution.device import select_device


def config(**changes: object) -> EngineConfig:
    return EngineConfig(model="m", engine_dir="/m", **changes)


def test_the_cpu_is_used_when_configured():
    assert select_device(config(device="cpu"), ParallelLayout()).type == "cpu"


def test_an_unknown_device_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="'tpu' but must be auto, cpu or cuda"):
        select_device(config(device="tpu"), ParallelLayout())


def test_an_absent_gpu_is_refused_by_number():
    with pytest.raises(ConfigError, match="GPU 99"):
        select_device(config(device="cuda", gpu_device_ids=(99,)), ParallelLayout())


def test_more_ranks_than_gpus_on_a_host_are_refused():
    layout = ParallelLayout(rank=1, tp_size=2, hosts=("a", "a"))

    with pytest.raises(ConfigError, match=r"2 ranks share this host but only GPUs \[0\]"):
        select_device(config(device="cuda", gpu_device_ids=(0,)), layout)
