"""Programs that bind to all interfaces are kept on loopback, and the operator's word counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trimaran.launcher.starters import loopback_only
from trimaran.launcher.starters.loopback_only import LoopbackOnly

BIND = """
import socket, sys
family = getattr(socket, sys.argv[1])
with socket.socket(family, getattr(socket, sys.argv[2])) as sock:
    sock.bind((sys.argv[3], 0))
    print(sock.getsockname()[0])
"""


@pytest.mark.parametrize(
    ("family", "kind", "asked", "bound"),
    [
        ("AF_INET", "SOCK_STREAM", "0.0.0.0", "127.0.0.1"),
        ("AF_INET6", "SOCK_STREAM", "::", "::1"),
        ("AF_INET", "SOCK_STREAM", "127.0.0.7", "127.0.0.7"),
        ("AF_INET", "SOCK_DGRAM", "0.0.0.0", "0.0.0.0"),
    ],
)
def test_network_interfaces_default_to_loopback(tmp_path, family, kind, asked, bound):
    env = {**os.environ, **LoopbackOnly(tmp_path).env()}

    done = subprocess.run(
        [sys.executable, "-c", BIND, family, kind, asked],
        env=env, capture_output=True, text=True,
    )  # fmt: skip

    assert (done.stdout.strip(), done.stderr) == (bound, "")


def test_interfaces_and_libraries_of_the_operator_are_kept(tmp_path):
    chosen = {"OMPI_MCA_btl_tcp_if_exclude": "eth0", "LD_PRELOAD": "/lib/other.so"}

    env = LoopbackOnly(tmp_path).env(chosen)

    assert env == {"LD_PRELOAD": f"{tmp_path}/loopback_only.so:/lib/other.so"}


def test_without_a_compiler_sockets_of_mpi_stay_open_on_all_interfaces_with_one_warning(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(loopback_only, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CC", raising=False)
    loopback = LoopbackOnly(tmp_path)

    assert [loopback.env(), loopback.env()] == [{}, {}]

    (record,) = caplog.records
    assert "open on all interfaces: there is no C compiler" in record.getMessage()


def test_a_library_that_the_loader_refuses_is_named_with_the_reason(
    tmp_path, monkeypatch, caplog
):
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nfor out; do prev=$last; last=$out; done\necho > "$6"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))

    assert LoopbackOnly(tmp_path).env() == {}

    assert "loopback_only.so is not loaded" in caplog.text
