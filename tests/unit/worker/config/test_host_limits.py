"""A process may use what its container's limits allow, not all that the host has."""

from __future__ import annotations

import os

import psutil
import pytest

from trimaran.worker.config.host_limits import free_memory_bytes, usable_cores

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path):
    """Write files of control groups; returns the arguments of both functions."""

    def write(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "groups", tmp_path / "membership"

    return write


def test_without_cgroup_limits_the_host_has_all_memory_of_the_machine(groups):
    where = groups("", {})
    assert usable_cores(*where) == len(os.sched_getaffinity(0))
    assert 0 < free_memory_bytes(*where) <= psutil.virtual_memory().total


def test_cgroup_v2_limits_apply_to_all_nested_cgroups(groups):
    files = {
        "job/cpu.max": "100000 100000\n",
        "job/step/cpu.max": "max 100000\n",
        "job/memory.max": f"{GIB}\n",
        "job/memory.stat": f"anon {GIB // 4}\nfile {GIB // 2}\n",
        "job/step/memory.max": "max\n",
    }
    where = groups("0::/job/step\n", files)
    assert usable_cores(*where) == 1
    assert free_memory_bytes(*where) == GIB - GIB // 4


def test_cgroup_v1_limits_are_read_from_each_controller(groups):
    files = {
        "cpu/cpu.cfs_quota_us": "50000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": f"{GIB}\n",
        "memory/memory.stat": f"rss 1\ntotal_rss {GIB // 2}\n",
    }
    # The paths are those of the host and do not exist in the container.
    where = groups("3:cpu:/docker/0123\n4:memory:/docker/0123\n1:name=systemd:/\n", files)
    assert usable_cores(*where) == 1
    assert free_memory_bytes(*where) == GIB // 2


def test_a_cgroup_without_a_limit_limits_nothing(groups):
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    where = groups("3:cpu:/\n4:memory:/\n", files)
    assert usable_cores(*where) == len(os.sched_getaffinity(0))
    assert free_memory_bytes(*where) > GIB // 4
