"""A run's folder is its own, also where several servers start at once."""

from __future__ import annotations

import fcntl
import tempfile

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.launcher.starters import run_dir
from trimaran.launcher.starters.run_dir import RunDir


def test_run_folders_of_dead_runs_are_deleted_and_other_folders_kept(tmp_path):
    alive, dead = RunDir(str(tmp_path)), RunDir(str(tmp_path))
    fcntl.flock(dead._lock, fcntl.LOCK_UN)  # as the kernel does when its owner dies

    latest = RunDir(str(tmp_path))

    assert alive.path.exists() and latest.path.exists() and not dead.path.exists()
    for each in (alive, dead, latest):
        each.remove()
    assert not list(tmp_path.iterdir())


def test_a_run_folder_deleted_before_its_lock_is_created_again(tmp_path, monkeypatch):
    flock, has_swept = fcntl.flock, []

    def lock_late(file, operation):
        if not has_swept:
            has_swept.append(True)
            run_dir._sweep(tmp_path)
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", lock_late)
    made = RunDir(str(tmp_path))

    assert list(tmp_path.iterdir()) == [made.path]
    run_dir._sweep(tmp_path)
    assert made.path.exists()
    made.remove()


@pytest.mark.parametrize("runtime", ["missing", "file", ""])
def test_an_unusable_runtime_folder_is_skipped(runtime, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if runtime else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = RunDir()
    assert made.path.parent == tmp_path
    made.remove()


def test_errors_of_the_runtime_folder_name_the_variable_that_sets_the_folder(
    tmp_path, monkeypatch
):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(ConfigError, match=r"too long a path.* in XDG_RUNTIME_DIR"):
        RunDir()
