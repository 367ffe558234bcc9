"""The session folders of an MPI library, and their deletion."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trimaran.launcher.starters.mpi_launch import MpiConfig, compose, find_mpi, starter_env
from trimaran.launcher.starters.run_dir import MpiSessionDirs, RunDir

RANK = "from mpi4py import MPI; MPI.COMM_WORLD.barrier(); print('up', flush=True); input()"


@pytest.fixture
def session_dirs() -> Iterator[MpiSessionDirs]:
    run_dir = RunDir()
    made = MpiSessionDirs(run_dir)
    yield made
    made.remove()
    run_dir.remove()


def folders(session_dirs: MpiSessionDirs, tag: str) -> list[Path]:
    env = session_dirs.env(tag, is_here_alone=True)
    names = "PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory"
    return [Path(env[name]) for name in names]


def test_the_files_of_a_killed_mpirun_are_deleted_with_its_group(session_dirs):
    tag = "model#1@2"
    env = {**starter_env(os.environ), **session_dirs.env(tag, is_here_alone=True)}
    session_dirs.prepare(tag)
    command = compose(
        find_mpi(MpiConfig()), 2, [sys.executable, "-c", RANK], oversubscribe=True
    )
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert all(any(folder.iterdir()) for folder in folders(session_dirs, tag))
        process.kill()
    assert all(any(folder.iterdir()) for folder in folders(session_dirs, tag))
    session_dirs.clear(tag)
    assert not any(folder.exists() for folder in folders(session_dirs, tag))


def test_groups_with_similar_names_have_separate_session_folders(session_dirs):
    names = {
        folders(session_dirs, tag)[0].name for tag in ("a#1", "a@1", "a:1", "a/1", "a%1", "a1")
    }
    assert len(names) == 6
    assert not any(mark in name for name in names for mark in "/:,#@")
