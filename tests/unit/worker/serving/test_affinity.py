"""The CPUs near a GPU."""

import os

import torch

from trimaran.worker.serving.rank_process import near_cpus, pci_place, pin_near, ranges


def test_the_processor_list_of_a_numa_node_is_parsed(tmp_path):
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text("0-3,8,10-11\n")
    assert near_cpus(pci_place(0, 0x1B, 0), tmp_path) == {0, 1, 2, 3, 8, 10, 11}


def test_a_device_without_a_numa_node_is_near_no_processor(tmp_path):
    (tmp_path / "0000:00:06.0").mkdir()
    (tmp_path / "0000:00:06.0" / "local_cpulist").write_text("\n")
    assert near_cpus("0000:00:06.0", tmp_path) == set()
    assert near_cpus("0000:00:07.0", tmp_path) == set()


def test_processors_are_written_as_ranges():
    assert ranges({10, 3, 1, 2, 8, 11}) == "1-3,8,10-11"
    assert ranges(set()) == ""


def test_a_rank_on_the_cpu_keeps_its_processors():
    before = os.sched_getaffinity(0)
    pin_near(torch.device("cpu"))
    assert os.sched_getaffinity(0) == before
