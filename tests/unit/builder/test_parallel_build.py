"""Weights are made layer by layer in several processes, and an interrupted build goes on."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from safetensors import safe_open

from trimaran.builder.journal import JOURNAL_FILE
from trimaran.builder.processes import ForkedWorkers, WorkerLostError

# The command forks before it starts threads, but a test process has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}

# Slow enough that a build is still running when killed or stopped.
_SLOW_DISK = (
    "import os, sys, time; from trimaran.launcher.cli.main import main; write = os.pwrite\n"
    "os.pwrite = lambda *given: (time.sleep(0.02), write(*given))[1]\n"
    "sys.exit(main(sys.argv[1:]))"
)


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _journal(output):
    path = output.with_name(f".{output.name}.partial") / JOURNAL_FILE
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def build(trimaran):
    """Build for two ranks; returns how the command ended."""

    def run(folder, output, *flags):
        return trimaran("build", "--checkpoint", folder, "--output", output, "--tp-size", 2,
                        *flags)  # fmt: skip

    return run


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes some writes of tensors and no more, while the context lasts."""

    @contextmanager
    def limit(num_writes):
        write, left = os.pwrite, iter(range(num_writes))

        def pwrite(file, data, start):
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            return write(file, data, start)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            yield

    return limit


def _assert_goes_on(build, folder, output, *flags):
    """Whatever is there of an earlier build, the result is that of a build from nothing."""
    done = build(folder, output, *flags)
    assert done.code == 0, done.err
    build(folder, output.with_name("whole"), *flags)
    assert _files(output) == _files(output.with_name("whole"))
    assert not output.with_name(f".{output.name}.partial").exists()


def test_every_tensor_has_its_checksum_in_the_header_and_the_header_in_the_config(
    llama, trimaran, tmp_path
):
    trimaran("build", "--checkpoint", llama().folder, "--output", tmp_path / "engine")
    path = tmp_path / "engine" / "rank0.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    checksums = header.pop("__metadata__")
    assert len(header) == 21
    for name, entry in header.items():
        first, end = entry["data_offsets"]
        data = raw[start + first : start + end]
        assert checksums[f"sha256:{name}"] == hashlib.sha256(data).hexdigest()
    (listed,) = json.loads((path.parent / "config.json").read_text())["shards"]
    assert listed["header_sha256"] == hashlib.sha256(raw[:start]).hexdigest()
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "pt"


def test_a_killed_parallel_build_resumes_after_its_finished_layers(llama, build, tmp_path):
    folder, output = llama(**LARGER).folder, tmp_path / "engine"
    words = ["--checkpoint", folder, "--output", output, "--tp-size", "2", "--workers", "2"]
    with subprocess.Popen([sys.executable, "-P", "-c", _SLOW_DISK, "build", *words]) as killed:
        while len(_journal(output)) < 4 and killed.poll() is None:
            time.sleep(0.001)
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    assert len(_journal(output)) >= 4
    # Its processes ended too: live processes would hold the folder's lock.
    _assert_goes_on(build, folder, output)


def test_a_disk_without_room_for_a_layer_is_named_and_nothing_is_left(
    llama, build, full_disk, tmp_path
):
    output = tmp_path / "out" / "engine"
    with full_disk(3):
        done = build(llama().folder, output)
    assert done.code == 2
    assert f"{output}: cannot be written: No space left" in done.err and "MiB free" in done.err
    assert list(output.parent.iterdir()) == []


def test_a_full_disk_keeps_finished_layers_with_a_message(llama, build, full_disk, tmp_path):
    folder, output = llama().folder, tmp_path / "engine"
    with full_disk(30):
        done = build(folder, output)
    assert done.code == 2
    assert "No space left on device" in done.err and "to go on, or remove it" in done.err
    units = [json.loads(line)["unit"] for line in _journal(output)[1:]]
    assert units == ["layers.0", "layers.1"]
    with full_disk(12 + 6):
        # One layer and what is outside the layers, of two ranks: no more is written.
        assert build(folder, output).code == 0


def test_damaged_layers_are_built_again(llama, build, full_disk, tmp_path):
    folder, output = llama().folder, tmp_path / "engine"
    with full_disk(30):
        build(folder, output)
    for path in output.with_name(".engine.partial").glob("rank*"):
        path.write_bytes(bytes(path.stat().st_size))
    _assert_goes_on(build, folder, output)


def test_a_truncated_journal_is_read_up_to_its_last_entry(llama, build, full_disk, tmp_path):
    folder, output = llama().folder, tmp_path / "engine"
    with full_disk(30):
        build(folder, output)
    path = output.with_name(".engine.partial") / JOURNAL_FILE
    path.write_text(path.read_text()[:-20])
    _assert_goes_on(build, folder, output)


@pytest.mark.parametrize("change", ["another dtype", "another checkpoint"])
def test_layers_of_a_different_build_are_not_reused(change, llama, build, full_disk, tmp_path):
    checkpoint, output = llama(), tmp_path / "engine"
    with full_disk(30):
        build(checkpoint.folder, output)
    flags = ["--dtype", "bfloat16"] if change == "another dtype" else []
    if change == "another checkpoint":
        checkpoint.tensors["model.norm.weight"] += 1
        checkpoint.save()
    _assert_goes_on(build, checkpoint.folder, output, *flags)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    llama, build, tmp_path, monkeypatch
):
    output = tmp_path / "out" / "engine"
    little = type("Usage", (), {"free": 4096})
    monkeypatch.setattr("shutil.disk_usage", lambda path: little)
    done = build(llama().folder, output)
    assert done.code == 2
    assert "0 MiB free" in done.err and "another --output" in done.err
    assert list(output.parent.iterdir()) == []


def test_a_disk_that_is_still_too_small_keeps_layers_of_the_earlier_build(
    llama, build, full_disk, tmp_path, monkeypatch
):
    folder, output = llama().folder, tmp_path / "engine"
    with full_disk(30):
        build(folder, output)
    journal = _journal(output)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4096}))
        done = build(folder, output)
    assert done.code == 2
    assert "0 MiB free" in done.err and "to go on, or remove it" in done.err
    assert _journal(output) == journal
    _assert_goes_on(build, folder, output)


def test_an_invalid_checkpoint_keeps_layers_of_a_build_of_another_checkpoint(
    llama, build, full_disk, tmp_path
):
    checkpoint, output = llama(), tmp_path / "engine"
    with full_disk(30):
        build(checkpoint.folder, output)
    journal = _journal(output)
    file = checkpoint.folder / "model.safetensors"
    whole = file.rename(tmp_path / "whole.safetensors")
    del checkpoint.tensors["model.norm.weight"]
    checkpoint.save()
    assert "1 missing" in build(checkpoint.folder, output).err
    whole.replace(file)
    assert _journal(output) == journal
    _assert_goes_on(build, checkpoint.folder, output)


def test_a_checkpoint_deleted_during_the_build_is_named_and_finished_layers_are_kept(
    llama, build, tmp_path, monkeypatch
):
    folder, output = llama().folder, tmp_path / "engine"
    file, away, write = folder / "model.safetensors", tmp_path / "away", os.pwrite

    def pwrite(descriptor, data, start):
        if len(_journal(output)) == 2 and file.exists():
            file.rename(away)
        return write(descriptor, data, start)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        done = build(folder, output)
    assert done.code == 2
    assert f"{file}: cannot be read: " in done.err and "cannot be written" not in done.err
    assert "to go on, or remove it" in done.err
    away.rename(file)
    _assert_goes_on(build, folder, output)


def test_a_worker_that_is_killed_is_named_with_the_signal():
    def job(task, say):
        if task == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(WorkerLostError, match=r"signal 9.*goes on where it stopped"):
        list(ForkedWorkers(job, 2, prepare=lambda: None).run(range(8)))


def test_an_error_in_a_worker_ends_the_other_workers():
    def job(task, say):
        if task == 1:
            raise OSError(5, "Input/output error")
        time.sleep(3600)

    with pytest.raises(OSError, match="Input/output error"):
        list(ForkedWorkers(job, 2, prepare=lambda: None).run(range(2)))


def test_progress_of_all_workers_is_summed():
    workers = ForkedWorkers(lambda task, say: say(task), 3, prepare=lambda: None)
    assert [result for result in workers.run(range(10)) if result] == []
    assert workers.num_done == 45


@pytest.mark.matrix(keep=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_build_stopped_by_a_signal_reports_that_it_can_resume(number, llama, build, tmp_path):
    folder, output = llama(**LARGER).folder, tmp_path / "engine"
    words = ["--checkpoint", folder, "--output", output, "--tp-size", "2", "--workers", "2"]
    command = [sys.executable, "-P", "-c", _SLOW_DISK, "build", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as stopped:
        while len(_journal(output)) < 4 and stopped.poll() is None:
            time.sleep(0.001)
        workers = psutil.Process(stopped.pid).children()
        stopped.send_signal(number)
        errors = stopped.communicate()[1]
    assert stopped.returncode == 128 + number
    assert f"stopped by {signal.Signals(number).name}. What is done is kept in" in errors
    assert "run the same command again to go on" in errors and "Traceback" not in errors
    assert len(workers) == 2 and not any(worker.is_running() for worker in workers)
    _assert_goes_on(build, folder, output)


def test_a_build_stopped_during_the_sync_keeps_all_layers(llama, build, tmp_path, monkeypatch):
    folder, output = llama().folder, tmp_path / "engine"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: signal.raise_signal(signal.SIGTERM))
        done = build(folder, output)
    assert done.code == 128 + signal.SIGTERM
    assert "to go on" in done.err and not output.exists()
    assert len(_journal(output)) == 1 + 6
    _assert_goes_on(build, folder, output)


def test_a_build_stopped_before_its_first_layer_leaves_nothing(
    llama, build, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *given: signal.raise_signal(signal.SIGINT))
        done = build(llama().folder, tmp_path / "out" / "engine", "--workers", "1")
    assert done.code == 128 + signal.SIGINT
    assert "stopped by SIGINT. Nothing was finished" in done.err
    assert list((tmp_path / "out").iterdir()) == []
