"""The choice of mpirun, and the command lines for each MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.launcher.config import HostSlots, MpiConfig
from trimaran.launcher.starters import mpi_launch
from trimaran.launcher.starters.mpi_launch import MPICH, OPENMPI, Mpi

VERSIONS = {
    "openmpi 5": ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", OPENMPI, "5.0.11", 5),
    "openmpi 4": ("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...", OPENMPI, "4.1.4", 4),
    "mpich": (
        "HYDRA build details:\n    Version:                                 5.0.2\n",
        MPICH, "5.0.2", 5,
    ),
}  # fmt: skip


def program(folder: Path, name: str, says: str) -> Path:
    """An mpirun that only prints its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'X'\n{says}\nX\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", VERSIONS)
def test_an_mpirun_is_known_by_its_version(tmp_path, name):
    says, kind, version, major = VERSIONS[name]
    found = mpi_launch.identify(str(program(tmp_path, "mpirun", says)))
    assert (found.kind, found.version, found.major) == (kind, version, major)


def test_a_program_that_is_no_mpirun_is_refused_with_its_output(tmp_path):
    path = program(tmp_path, "mpirun", "coreutils 9")
    with pytest.raises(ConfigError, match="it says 'coreutils 9'"):
        mpi_launch.find_mpi(MpiConfig(mpirun=str(path)))


def test_a_named_mpirun_must_exist_and_be_of_the_named_kind(tmp_path):
    with pytest.raises(ConfigError, match="no such program"):
        mpi_launch.find_mpi(MpiConfig(mpirun=str(tmp_path / "mpirun")))
    path = program(tmp_path, "mpirun", VERSIONS["mpich"][0])
    with pytest.raises(ConfigError, match="--mpi openmpi does not fit"):
        mpi_launch.find_mpi(MpiConfig(kind="openmpi", mpirun=str(path)))


def test_the_mpirun_beside_the_interpreter_is_preferred_to_the_path(tmp_path, monkeypatch):
    program(tmp_path, "mpirun", VERSIONS["mpich"][0])
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = mpi_launch.find_mpi(MpiConfig())
    assert found.mpirun.startswith(sysconfig.get_path("scripts"))
    assert mpi_launch.find_mpi(MpiConfig(kind="mpich")).mpirun == str(tmp_path / "mpirun")


def test_the_installed_mpirun_is_the_one_of_mpi4pys_library():
    found = mpi_launch.find_mpi(MpiConfig())
    assert mpi_launch.check_library(found).startswith("Open MPI v")


def test_mpi_is_found_and_started_without_a_home_folder(monkeypatch):
    monkeypatch.delenv("HOME")
    found = mpi_launch.find_mpi(MpiConfig())
    env = mpi_launch.starter_env(os.environ)
    done = subprocess.run(
        [*mpi_launch.compose(found, 1, ["echo", "started"])],
        env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "started", done.stderr


def test_an_mpirun_of_another_library_is_refused(tmp_path):
    path = program(tmp_path, "mpirun", VERSIONS["mpich"][0])
    with pytest.raises(ConfigError, match=r"mpi4py loads Open MPI .* MPICH 5\.0\.2"):
        mpi_launch.check_library(mpi_launch.find_mpi(MpiConfig(mpirun=str(path))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: x", (OPENMPI, 5)),
        ("Open MPI v4.1.6, package: x", (OPENMPI, 4)),
        ("MPICH Version:      4.0.2\nMPICH Release date: x", (MPICH, 4)),
        ("Other MPI 1.0", ("", 0)),
    ],
)
def test_a_library_is_known_by_its_version_line(text, expected):
    assert mpi_launch.parse_library(text) == expected


def test_open_mpi_gets_its_flags_and_no_secret_on_the_command_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    line = mpi_launch.compose(
        Mpi("/m/mpirun", OPENMPI, "5.0.11"), 2, ["rank"], forward=["A", "B"], oversubscribe=True
    )
    assert line == [
        "/m/mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca",
        "mpi_yield_when_idle", "1", "-x", "A", "-x", "B", "-n", "2", "rank",
    ]  # fmt: skip


def test_open_mpi_without_root_or_too_few_slots_gets_fewer_flags(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    line = mpi_launch.compose(Mpi("mpirun", OPENMPI, "4.1.4"), 8, ["rank"])
    assert line == [
        "mpirun", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", "-n", "8", "rank",
    ]  # fmt: skip


def test_mpich_passes_the_whole_environment_by_itself():
    line = mpi_launch.compose(
        Mpi("mpirun", MPICH, "5.0.2"), 4, ["rank"], forward=["A"], oversubscribe=True
    )
    assert line == ["mpirun", "-genvall", "-bind-to", "none", "-n", "4", "rank"]


HOSTS = (HostSlots("h1", 2), HostSlots("h2", 1))


@pytest.mark.parametrize(
    ("kind", "version", "expected"),
    [
        (OPENMPI, "5.0.11", ["--host", "h1:2,h2:1", "--prtemca", "plm_ssh_agent", "/bin/rsh"]),
        (OPENMPI, "4.1.4", ["--host", "h1:2,h2:1", "plm_rsh_agent", "/bin/rsh"]),
        (MPICH, "5.0.2", ["-hosts", "h1:2,h2:1", "-launcher-exec", "/bin/rsh"]),
    ],
)
def test_ranks_are_put_on_hosts_through_the_named_agent(kind, version, expected):
    line = mpi_launch.compose(
        Mpi("/m/mpirun", kind, version), 3, ["rank"], hosts=HOSTS, rsh_agent="/bin/rsh"
    )
    assert [word for word in line if word in expected] == expected
    assert line[-3:] == ["-n", "3", "rank"]


def test_the_daemons_of_other_hosts_find_mpirun_by_its_whole_path():
    line = mpi_launch.compose(Mpi("mpirun", OPENMPI, "5.0.11"), 3, ["rank"], hosts=HOSTS)
    assert os.path.isabs(line[0])


def test_mpirun_starts_local_ranks_without_ssh_and_rsh(tmp_path):
    assert "OMPI_MCA_plm_rsh_agent" in mpi_launch.starter_env({"PATH": str(tmp_path)})
    program(tmp_path, "ssh", "")
    assert "OMPI_MCA_plm_rsh_agent" not in mpi_launch.starter_env({"PATH": str(tmp_path)})


def test_a_starter_drops_variables_of_an_outer_job_and_prefers_its_own_mpi():
    env = mpi_launch.starter_env(
        {"PATH": "/usr/bin", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0", "PMI_SIZE": "2",
         "OMPI_MCA_btl": "self", "CUDA_VISIBLE_DEVICES": "3"}
    )  # fmt: skip
    assert env["PATH"] == f"{sysconfig.get_path('scripts')}:/usr/bin"
    assert not any(name.startswith(("OMPI_COMM", "PMI")) for name in env)
    assert (env["OMPI_MCA_btl"], env["CUDA_VISIBLE_DEVICES"]) == ("self", "3")


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [(OPENMPI, 137, 9), (OPENMPI, 139, 11), (OPENMPI, 1, 0), (OPENMPI, 9, 0), (MPICH, 9, 9),
     (MPICH, 11, 11), (MPICH, 1, 0), (OPENMPI, 255, 0)],
)  # fmt: skip
def test_a_death_is_read_from_mpiruns_exit_code(kind, code, expected):
    assert mpi_launch.exit_signal(Mpi("mpirun", kind, "5"), code) == expected


def test_serving_imports_no_torch_and_no_mpi():
    code = (
        "import sys, trimaran.launcher.cli.serve; "
        "sys.exit('torch' in sys.modules or 'mpi4py' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0
