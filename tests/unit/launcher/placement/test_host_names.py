"""Host names that cannot be resolved are refused before a process starts."""

from __future__ import annotations

import socket

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.bench.serving.free_ports import free_ports
from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli import main as cli
from trimaran.launcher.placement import preflight
from trimaran.launcher.placement.hosts import advertised_ip, check_host_names

NOWHERE = "no-such-host.invalid"


@pytest.fixture
def repository(tmp_path):
    engine = write_engine(tmp_path / "engine", tp_size=1)
    write_model(tmp_path / "repo" / "m", gpt_model_path=str(engine))
    return tmp_path / "repo"


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A program named ssh whose configuration has an alias for one host."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "ssh"
    path.write_text(
        '#!/bin/sh\nfor host; do :; done\n[ "$host" = near ] && host=localhost\n'
        'echo "host $host"; echo "hostname $host"\n'
        'if [ "$host" = behind ]; then echo "proxyjump gate"; fi\n'
    )
    path.chmod(0o755)
    return str(path)


def configuration(repository, *flags):
    return resolve(repository, "--device", "cpu", *flags)


@pytest.mark.parametrize("address", [NOWHERE, "a..b", "::1"])
def test_an_unreachable_advertised_address_is_refused(repository, address):
    # Ports are checked before names, and default ports may be in use.
    ports = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    flags = [f"--{name}-port={port}" for name, port in ports]
    config = configuration(repository, f"--advertise-address={address}", *flags)
    with pytest.raises(ConfigError) as caught:
        preflight.check(config)
    assert f"--advertise-address {address}: no IPv4 address is found" in str(caught.value)
    assert "leave the flag out" in str(caught.value)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_an_advertised_address_may_be_a_name_or_a_number(repository, address):
    check_host_names(configuration(repository, "--advertise-address", address), {})
    assert advertised_ip(address) == "127.0.0.1"


def test_an_advertised_address_of_another_host_is_refused(repository):
    config = configuration(repository, "--advertise-address", "192.0.2.1")
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this host"):
        check_host_names(config, {})


def test_a_host_name_that_resolves_to_loopback_is_not_advertised(monkeypatch):
    entry = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [entry])
    with pytest.raises(ConfigError, match=r"means 127\.0\.1\.1 here.*do not reach"):
        advertised_ip("node1")


@pytest.mark.parametrize("flags", [(), ("--multi-model",)])
def test_an_unresolvable_host_is_refused(repository, flags):
    config = configuration(repository, "--hosts", NOWHERE, *flags)
    with pytest.raises(ConfigError, match=f"names '{NOWHERE}', but no address .* /etc/hosts"):
        check_host_names(config, {})


@pytest.mark.parametrize("host", ["localhost", "192.0.2.1", "near", "behind"])
def test_a_host_may_be_defined_in_the_ssh_configuration_alone(repository, ssh, host):
    check_host_names(configuration(repository, "--hosts", host, "--rsh-agent", f"{ssh} -v"), {})


def test_a_host_unknown_to_dns_and_ssh_is_refused(repository, ssh):
    with pytest.raises(ConfigError, match=f"names '{NOWHERE}'"):
        check_host_names(configuration(repository, "--hosts", NOWHERE, "--rsh-agent", ssh), {})


def test_hosts_are_not_resolved_when_slurm_or_another_agent_starts_ranks(repository):
    flags = ("--hosts", NOWHERE)
    check_host_names(configuration(repository, *flags), {"SLURM_JOB_ID": "7"})
    check_host_names(configuration(repository, *flags), {"PRTE_MCA_plm_ssh_agent": "x"})
    check_host_names(configuration(repository, *flags, "--rsh-agent", "/bin/sh -c"), {})


def test_the_doctor_reports_unresolvable_hosts(repository, capsys, free_port):
    ports = [f"--{name}-port={free_port}" for name in ("http", "grpc", "metrics")]
    flags = ["--model-repo", str(repository), "--load-format", "random", "--hosts", NOWHERE]
    assert cli.main(["doctor", *ports, *flags]) == 1
    assert f"BAD  models         --hosts or --hostfile names '{NOWHERE}'" in (
        capsys.readouterr().out
    )
