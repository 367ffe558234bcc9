"""What `trimaran doctor` says of this machine."""

from __future__ import annotations

import socket

from trimaran.launcher import cli


def ports(port: int) -> list[str]:
    """Flags that have the doctor look at one port only."""
    return [f"--{name}-port={port}" for name in ("http", "grpc", "metrics")]


def test_the_doctor_finds_this_machine_fit(capsys, free_port):
    assert cli.main(["doctor", *ports(free_port)]) == 0
    report = capsys.readouterr().out
    assert "ok   MPI library    Open MPI v" in report
    assert "BAD" not in report
    assert report.endswith("`trimaran serve` can work here.\n")


def test_a_wrong_mpirun_is_bad_and_code_1(capsys, free_port):
    assert cli.main(["doctor", "--mpirun", "/bin/true", *ports(free_port)]) == 1
    report = capsys.readouterr().out
    assert "BAD  MPI            /bin/true is neither Open MPI nor MPICH" in report
    assert report.endswith("1 thing(s) to mend before `trimaran serve` can work here.\n")


def test_a_busy_port_is_a_note_since_another_would_do(capsys):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        assert cli.main(["doctor", *ports(port)]) == 0
    assert (
        f"note http port      --http-port {port}: the port is in use" in capsys.readouterr().out
    )
