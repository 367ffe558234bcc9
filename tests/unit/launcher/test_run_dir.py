"""A run's folder is its own, also where several servers start at once."""

from __future__ import annotations

import fcntl

from trimaran.launcher import run_dir
from trimaran.launcher.run_dir import RunDir


def test_the_folders_of_dead_runs_are_swept_and_of_others_kept(tmp_path):
    alive, dead = RunDir(str(tmp_path)), RunDir(str(tmp_path))
    fcntl.flock(dead._lock, fcntl.LOCK_UN)  # as the kernel does when its owner dies

    latest = RunDir(str(tmp_path))

    assert alive.path.exists() and latest.path.exists() and not dead.path.exists()
    for each in (alive, dead, latest):
        each.remove()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
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
