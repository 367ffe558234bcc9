"""Refusals before any process starts, on real sockets and folders."""

from __future__ import annotations

import os
import socket

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.placement import hosts, preflight
from trimaran.launcher.placement.preflight import Endpoint
from trimaran.launcher.starters.run_dir import RunDir
from trimaran.worker.config.host_limits import free_memory_bytes


@pytest.fixture
def busy_port():
    """A port with a listener of this process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_busy_port_is_named_with_the_program_that_holds_it(busy_port):
    with pytest.raises(ConfigError) as caught:
        preflight.check_ports([Endpoint("grpc", "127.0.0.1", busy_port)])
    assert f"--grpc-port {busy_port}: the port is in use by pid {os.getpid()} (" in str(
        caught.value
    )
    assert "choose another --grpc-port" in str(caught.value)


def test_a_port_busy_on_one_address_is_busy_for_all(busy_port):
    with pytest.raises(ConfigError, match="in use"):
        preflight.check_ports([Endpoint("http", "0.0.0.0", busy_port)])


def test_a_port_shared_by_so_reuseport_is_busy():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ConfigError, match="in use"):
            preflight.check_ports([Endpoint("grpc", "0.0.0.0", listener.getsockname()[1])])


def test_a_port_named_twice_is_refused(free_port):
    wanted = [Endpoint("http", "0.0.0.0", free_port), Endpoint("metrics", "", free_port)]
    with pytest.raises(ConfigError, match=f"--metrics-port are both {free_port}"):
        preflight.check_ports(wanted)


def test_one_port_on_two_addresses_is_fine(free_port):
    preflight.check_ports(
        [Endpoint("http", "127.0.0.1", free_port), Endpoint("grpc", "127.0.0.2", free_port)]
    )


def test_an_address_that_is_not_ours_is_refused(free_port):
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        preflight.check_ports([Endpoint("http", "192.0.2.1", free_port)])


def test_an_invalid_address_is_refused_with_an_example(free_port):
    with pytest.raises(ConfigError, match=r"--http-address \[::1\]: .* without brackets"):
        preflight.check_ports([Endpoint("http", "[::1]", free_port)])
    with pytest.raises(ConfigError, match=r"--grpc-address a\.\.b: this is no host's name"):
        preflight.check_ports([Endpoint("grpc", "a..b", free_port)])


def test_too_few_gpus_are_counted_in_the_refusal(monkeypatch):
    monkeypatch.setattr(preflight, "num_visible_gpus", lambda: 1)
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(ConfigError, match="world size 2 needs 2 GPUs but 1 are visible"):
        preflight.check_gpus(2, ())
    with pytest.raises(ConfigError, match="names GPU 3 but 1 are visible"):
        preflight.check_gpus(1, (3,))


@pytest.mark.feature("variable:CUDA_VISIBLE_DEVICES", of="request")
def test_hidden_gpus_do_not_count(monkeypatch):
    monkeypatch.setattr(hosts, "_num_driver_gpus", lambda: 4)
    for chosen, expected in (("0,1", 2), ("", 0), ("-1", 0), ("0,-1,1", 1), ("MIG-a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert hosts.num_visible_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert hosts.num_visible_gpus() == 4


def test_a_small_shared_memory_is_refused_with_the_size_that_is_needed():
    with pytest.raises(ConfigError, match="ranks need"):
        preflight.check_shared_memory(10**9)
    with pytest.raises(ConfigError, match="shared memory"):
        preflight.check_shared_memory(1, "/no/such/folder")


def test_host_memory_for_blocks_is_compared_with_free_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    engine = str(write_engine(tmp_path / "engine", tp_size=2))
    each = free_memory_bytes() * 3 // 10
    for name in ("m", "n"):
        values = {"gpt_model_path": engine, "kv_cache_host_memory_bytes": str(each)}
        write_model(tmp_path / "repo" / name, **values)
    preflight.check_groups(resolve(tmp_path / "repo", "--tensorrt-llm-model-name", "m").groups)
    with pytest.raises(ConfigError, match=f"adds up to {4 * each} bytes .* ranks of m, n, but"):
        preflight.check_groups(resolve(tmp_path / "repo", "--multi-model").groups)


def test_a_run_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunDir(str(tmp_path / "missing"))
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long a path"):
        RunDir(str(deep))
    assert list(deep.iterdir()) == []


def test_a_run_folder_is_private_and_removed_on_request(tmp_path):
    run_dir = RunDir(str(tmp_path))
    assert run_dir.path.stat().st_mode & 0o077 == 0
    other = RunDir(str(tmp_path))
    assert run_dir.path.exists()
    run_dir.remove()
    other.remove()
    assert list(tmp_path.iterdir()) == []
