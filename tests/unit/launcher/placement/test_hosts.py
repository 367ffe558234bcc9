"""Hosts from flags, from files and from a Slurm allocation."""

from __future__ import annotations

import socket

import pytest
from launcher_repository import parse

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement.hosts import allocated_hosts, is_this_host, named_hosts
from trimaran.launcher.placement.placement import Host


def test_each_mention_of_a_host_is_one_slot_unless_a_count_is_given():
    hosts = named_hosts(parse("--hosts", "a,b:2, a"), "cpu")
    assert hosts == (Host(name="a", num_slots=2), Host(name="b", num_slots=2))


def test_slots_on_gpu_hosts_are_gpus():
    (host,) = named_hosts(parse("--hosts", "a:4"), "cuda")
    assert (host.num_slots, host.num_gpus) == (4, 4)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_host_files_of_open_mpi_and_mpich_are_read(tmp_path, encoding):
    path = tmp_path / "hosts"
    path.write_text("a slots=3 # old\n\n# rack 1\nb:2\nc\n", encoding)
    hosts = named_hosts(parse("--hostfile", str(path)), "cpu")
    assert [(host.name, host.num_slots) for host in hosts] == [("a", 3), ("b", 2), ("c", 1)]
    path.write_text("# none\n")
    with pytest.raises(ConfigError, match="names no host"):
        named_hosts(parse("--hostfile", str(path)), "cpu")


@pytest.mark.parametrize(
    "text", ["a:", "a:0", "a:2:3", ":2", "a b", "-a", "a,,b", "a:²", f"a:{'9' * 5000}"]
)
def test_invalid_host_names_are_refused(text):
    with pytest.raises(ConfigError, match="is not a host"):
        named_hosts(parse(f"--hosts={text}"), "cpu")


def test_all_names_of_this_host_are_recognised():
    assert is_this_host("localhost")
    assert is_this_host(socket.gethostname())
    assert not is_this_host("node-of-nobody")


def test_nodes_of_a_slurm_job_have_their_allocated_cpus_as_slots():
    environ = {
        "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n1,n2,n3",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),4", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip
    hosts = allocated_hosts(environ, "cuda")
    assert [(h.name, h.num_slots, h.num_gpus) for h in hosts] == [
        ("n1", 8, 2), ("n2", 8, 2), ("n3", 4, 2),
    ]  # fmt: skip
    assert allocated_hosts({**environ, "SLURM_JOB_NUM_NODES": "1"}, "cpu") == ()
    with pytest.raises(ConfigError, match=r"3 nodes .* but 1 numbers of CPUs"):
        allocated_hosts({**environ, "SLURM_JOB_CPUS_PER_NODE": "8"}, "cpu")


def test_a_node_list_with_ranges_needs_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "")
    environ = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    with pytest.raises(ConfigError, match="scontrol is not on PATH"):
        allocated_hosts(environ, "cpu")
