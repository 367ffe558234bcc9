"""Ports for servers that processes start side by side."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trimaran.bench.serving import free_ports as ports
from trimaran.bench.serving.free_ports import free_ports

ASK = """
import sys
from trimaran.bench.serving.free_ports import free_ports
print(*free_ports(1500), flush=True)
sys.stdin.read()
"""


def test_concurrent_processes_get_different_ports():
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    given = [int(port) for each in asking for port in each.stdout.readline().split()]
    for each in asking:
        each.communicate(timeout=60)
    assert len(set(given)) == 3000


def test_ports_of_an_ended_process_are_reused():
    code = (
        "from trimaran.bench.serving import free_ports as ports\n"
        "ports._candidates = lambda: range(21_000, 21_040)\n"
        "ports.free_ports(20)\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_more_ports_than_available_are_an_error(monkeypatch):
    monkeypatch.setattr(ports, "_candidates", lambda: range(21_100, 21_103))
    with pytest.raises(OSError, match=r"4 ports asked for, only [0-3] are free"):
        free_ports(4)


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        free = free_ports(1)[0]
        ports._given.discard(free)
        monkeypatch.setattr(ports, "_candidates", lambda: [taken, free])
        assert free_ports(1) == [free]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("32768 60999", range(10_000, 32_768)),
        ("16000\t65535", range(10_000, 16_000)),
        ("10000 30000", range(30_001, 65_536)),
        ("1024 65535", range(20_000, 32_000)),
    ],
)
def test_no_ephemeral_port_is_given(tmp_path, monkeypatch, text, expected):
    file = tmp_path / "ip_local_port_range"
    file.write_text(text + "\n")
    monkeypatch.setattr(ports, "_RANGE_FILE", file)
    ports._candidates.cache_clear()
    assert ports._candidates() == expected
    ports._candidates.cache_clear()


def test_the_usual_range_is_assumed_if_the_ephemeral_range_cannot_be_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ports, "_RANGE_FILE", Path(tmp_path, "none"))
    ports._candidates.cache_clear()
    assert ports._candidates() == range(20_000, 32_000)
    ports._candidates.cache_clear()
