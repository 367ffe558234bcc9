"""Builds with SmoothQuant: checks read no text, and an interrupted build goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trimaran.builder.journal import JOURNAL_FILE

# The command forks before it starts threads, but a test process has threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

DRAFT = Path(__file__).parents[3] / "examples" / "demo_models" / "draft"


@pytest.fixture
def flags(tmp_path):
    """Flags of SmoothQuant with a text."""
    text = tmp_path / "text.txt"
    text.write_text("It was a cold morning, and the road was white with frost. " * 4)
    return ("--smoothquant", "0.5", "--per_channel", "--calib_dataset", text)


@pytest.fixture
def broken(tmp_path):
    """A model that no text can be read with: its inputs are not finite."""
    folder = tmp_path / "broken"
    shutil.copytree(DRAFT, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _left(tmp_path):
    """What lies beside the outputs."""
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))


def test_a_dry_run_reads_no_text_and_tells_the_size_of_the_build(
    broken, flags, trimaran, tmp_path
):
    words = ("--output", tmp_path / "out", *flags)
    done = trimaran("build", "--checkpoint", broken, *words, "--dry-run")
    assert done.code == 0, done.err
    assert not (tmp_path / "out").exists() and _left(tmp_path) == []
    real = trimaran("build", "--checkpoint", broken, *words)
    assert real.code == 2 and "are not finite" in real.err
    assert not (tmp_path / "out").exists() and _left(tmp_path) == []

    real = trimaran("build", "--checkpoint", DRAFT, *words)
    assert real.code == 0, real.err
    size = (tmp_path / "out" / "rank0.safetensors").stat().st_size / 2**20
    assert f"({size:.1f} MiB)" in done.out


@pytest.mark.parametrize("command", ["build", "convert"])
def test_a_configuration_alone_is_that_of_the_build_and_reads_no_text(
    command, broken, flags, trimaran, tmp_path
):
    words = (*flags, "--int8_kv_cache", "--tp-size", "2")
    for name, folder, more in (("alone", broken, ["--save-config-only"]), ("out", DRAFT, [])):
        done = trimaran(
            command, "--checkpoint", folder, "--output", tmp_path / name, *words, *more
        )
        assert done.code == 0, done.err
    assert list(_files(tmp_path / "alone")) == ["config.json"] and _left(tmp_path) == []
    alone, whole = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("alone", "out")
    )
    assert alone.pop("shards") == [] and len(whole.pop("shards")) == 2
    assert alone == whole


def test_impossible_sizes_are_refused_before_the_text_is_read(
    broken, flags, trimaran, tmp_path
):
    done = trimaran(
        "build", "--checkpoint", broken, "--output", tmp_path / "out", *flags, "--tp-size", "5"
    )
    assert done.code == 2 and "num_attention_heads" in done.err


@pytest.fixture
def stopped(trimaran, monkeypatch, tmp_path):
    """Build up to the moment when the disk has to take the engine's files, or the first write
    to them, and stop there."""

    def run(*words, at="fsync"):
        real = getattr(os, at)

        def stopping(file, *data):
            if ".engine.partial" in os.readlink(f"/proc/self/fd/{file}"):
                signal.raise_signal(signal.SIGTERM)
            return real(file, *data)

        with monkeypatch.context() as patch:
            patch.setattr(os, at, stopping)
            done = trimaran("build", "--output", tmp_path / "engine", "--workers", "1", *words)
        assert done.code == 128 + signal.SIGTERM, done.err
        return done

    return run


def _build_both(trimaran, tmp_path, *words):
    """Go on with the interrupted build, and build from nothing: the results are equal."""
    for name in ("engine", "whole"):
        done = trimaran("build", "--output", tmp_path / name, *words)
        assert done.code == 0, done.err
    assert _files(tmp_path / "engine") == _files(tmp_path / "whole")
    assert _left(tmp_path) == []


def test_an_interrupted_build_goes_on_with_its_smoothed_weights_and_its_layers(
    flags, stopped, trimaran, tmp_path
):
    words = ("--checkpoint", DRAFT, *flags)
    sources, partial = tmp_path / ".engine.smoothed", tmp_path / ".engine.partial"
    seen = []
    for _ in range(2):
        done = stopped(*words)
        assert f"What is done is kept in {sources} and {partial} (" in done.err
        made = (sources / "weights" / "model.safetensors").stat()
        seen.append(((made.st_ino, made.st_mtime_ns), (partial / JOURNAL_FILE).read_text()))
    assert seen[0] == seen[1]
    assert len(seen[0][1].splitlines()) > 2
    _build_both(trimaran, tmp_path, *words)


def test_smoothed_weights_are_kept_even_if_no_layer_is_cut(flags, stopped, trimaran, tmp_path):
    words = ("--checkpoint", DRAFT, *flags)
    done = stopped(*words, at="pwrite")
    assert f"What is done is kept in {tmp_path / '.engine.smoothed'} (" in done.err
    assert "Nothing" not in done.err and _left(tmp_path) == [".engine.smoothed"]
    _build_both(trimaran, tmp_path, *words)


def test_other_settings_begin_anew(flags, stopped, trimaran, tmp_path):
    stopped("--checkpoint", DRAFT, *flags)
    other = ("--smoothquant", "0.75", *flags[2:])
    _build_both(trimaran, tmp_path, "--checkpoint", DRAFT, *other)


def test_a_build_without_smoothquant_removes_smoothed_weights(
    flags, stopped, trimaran, tmp_path
):
    stopped("--checkpoint", DRAFT, *flags)
    _build_both(trimaran, tmp_path, "--checkpoint", DRAFT)
