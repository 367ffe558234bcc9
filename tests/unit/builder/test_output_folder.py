"""An output folder appears whole or not at all, and never in the place of something else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest

from trimaran.builder.output_folder import replaced_folder
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_second_build_replaces_the_first(llama, trimaran, tmp_path):
    folder, output = llama().folder, tmp_path / "out" / "engine"
    trimaran("build", "--checkpoint", folder, "--output", output, "--tp-size", 4)
    done = trimaran("build", "--checkpoint", folder, "--output", output, "--tp-size", 2)
    assert done.code == 0
    assert _names(output) == ["config.json", "rank0.safetensors", "rank1.safetensors"]
    assert _names(output.parent) == ["engine"]


def test_a_tokenizer_that_was_copied_beside_the_weights_survives_the_next_build(
    llama, trimaran, tmp_path
):
    folder, output = llama().folder, tmp_path / "engine"
    trimaran("build", "--checkpoint", folder, "--output", output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (output / name).write_text(name)
    trimaran("build", "--checkpoint", folder, "--output", output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_text() == name


def test_a_reader_of_the_replaced_folder_keeps_its_weights(llama, trimaran, tmp_path):
    folder, output = llama().folder, tmp_path / "engine"
    trimaran("build", "--checkpoint", folder, "--output", output)
    before = (output / "rank0.safetensors").read_bytes()
    with (output / "rank0.safetensors").open("rb") as reader:
        trimaran("build", "--checkpoint", folder, "--output", output, "--dtype", "float16")
        assert reader.read() == before


def test_a_failed_build_leaves_the_earlier_folder_unchanged(llama, trimaran, tmp_path):
    checkpoint, output = llama(), tmp_path / "out" / "engine"
    trimaran("build", "--checkpoint", checkpoint.folder, "--output", output)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    del checkpoint.tensors["model.norm.weight"]
    checkpoint.save()
    assert trimaran("build", "--checkpoint", checkpoint.folder, "--output", output).code == 2
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert _names(output.parent) == ["engine"]


def test_remains_of_a_killed_build_are_removed(llama, trimaran, tmp_path):
    output = tmp_path / "out" / "engine"
    leftover = output.parent / ".engine.partial"
    leftover.mkdir(parents=True)
    (leftover / "rank7.safetensors").write_bytes(b"half a shard")
    assert trimaran("build", "--checkpoint", llama().folder, "--output", output).code == 0
    assert _names(output.parent) == ["engine"]
    assert _names(output) == ["config.json", "rank0.safetensors"]


def test_a_folder_with_other_files_is_refused_and_kept(llama, trimaran, tmp_path):
    output = tmp_path / "mine"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    done = trimaran("build", "--checkpoint", llama().folder, "--output", output)
    assert done.code == 2
    assert "thesis.txt" in done.err and "another --output" in done.err
    assert _names(output) == ["thesis.txt"]


def test_the_checkpoint_itself_is_no_output(llama, trimaran):
    folder = llama().folder
    done = trimaran("build", "--checkpoint", folder, "--output", folder)
    assert done.code == 2
    assert _names(folder) == ["config.json", "model.safetensors"]


def test_an_empty_folder_and_the_current_one_are_filled(llama, trimaran, tmp_path, monkeypatch):
    folder, output = llama().folder, tmp_path / "engine"
    output.mkdir()
    monkeypatch.chdir(tmp_path)
    assert trimaran("build", "--checkpoint", folder, "--output", "engine").code == 0
    assert _names(output) == ["config.json", "rank0.safetensors"]


def test_the_target_of_a_link_is_filled(llama, trimaran, tmp_path):
    folder, real = llama().folder, tmp_path / "large" / "engine"
    real.parent.mkdir()
    (tmp_path / "engine").symlink_to(real)
    for _ in range(2):
        done = trimaran("build", "--checkpoint", folder, "--output", tmp_path / "engine")
        assert done.code == 0, done.err
        assert _names(real) == ["config.json", "rank0.safetensors"]
        assert _names(real.parent) == ["engine"]
        assert _names(tmp_path) == ["engine", "large", "llama"]


def test_a_mount_point_is_filled_without_a_rename(llama, trimaran, tmp_path, monkeypatch):
    folder, output = llama().folder, tmp_path / "engine"
    (output / "lost+found").mkdir(parents=True)
    monkeypatch.setattr("os.path.ismount", lambda path: path == output)
    for size in (2, 1):
        done = trimaran("build", "--checkpoint", folder, "--output", output, "--tp-size", size)
        assert done.code == 0, done.err
    assert _names(output) == ["config.json", "lost+found", "rank0.safetensors"]
    assert _names(tmp_path) == ["engine", "llama"]
    assert EngineFolder.load(output).mapping.tp_size == 1


@pytest.mark.parametrize("is_mount", [False, True])
def test_a_folder_is_synced_to_disk_before_its_rename(tmp_path, monkeypatch, is_mount):
    output, events = tmp_path / "engine", []
    output.mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: is_mount and path == output)
    sync, rename = os.fsync, os.rename

    def synced(file):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
        sync(file)

    def renamed(source, target):
        events.append(("name", os.path.basename(target)))
        rename(source, target)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.rename", renamed)
    with replaced_folder(output) as folder:
        for name in ("config.json", "rank0.safetensors"):
            (folder / name).write_text("new")

    # A process that is not a command keeps its signal handlers.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    files = [("sync", "config.json"), ("sync", "rank0.safetensors")]
    if is_mount:
        assert events[:3] == [*files, ("sync", ".partial")]
        assert events[3:5] == [("name", "rank0.safetensors"), ("sync", "engine")]
        assert events[5:] == [("name", "config.json"), ("sync", "engine")]
    else:
        assert events[:3] == [*files, ("sync", ".engine.partial")]
        assert events[-2:] == [("name", "engine"), ("sync", tmp_path.name)]


def test_a_disk_error_at_the_end_leaves_the_earlier_folder(tmp_path, monkeypatch):
    output = tmp_path / "engine"
    with replaced_folder(output) as folder:
        (folder / "config.json").write_text('{"format_version": 1}')

    def failed(file):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("os.fsync", failed)
    with pytest.raises(ConfigError, match="Disk quota exceeded"):
        with replaced_folder(output) as folder:
            (folder / "config.json").write_text('{"format_version": 2}')
    assert (output / "config.json").read_text() == '{"format_version": 1}'
    assert _names(tmp_path) == ["engine"]


def test_two_builds_of_one_folder_at_a_time_are_refused(tmp_path):
    with replaced_folder(tmp_path / "engine"):
        with pytest.raises(ConfigError, match="another build is writing"):
            with replaced_folder(tmp_path / "engine"):
                pass


def test_a_dry_run_checks_and_writes_nothing(llama, trimaran, tmp_path):
    folder, output = llama().folder, tmp_path / "engine"
    words = ["build", "--checkpoint", folder, "--output", output, "--dry-run"]
    assert trimaran(*words).code == 0
    assert trimaran(*words, "--tp-size", "5").code == 2
    assert not output.exists()


def test_a_folder_without_weights_can_be_described(llama, trimaran, tmp_path):
    output = tmp_path / "engine"
    words = ["--checkpoint", llama().folder, "--output", output, "--save-config-only"]
    assert trimaran("build", *words, "--tp-size", 2).code == 0
    assert _names(output) == ["config.json"]
    assert EngineFolder.load(output, check_weights=False).mapping.tp_size == 2
    with pytest.raises(ConfigError, match=r"rank0\.safetensors: missing"):
        EngineFolder.load(output)


def test_shards_have_the_permissions_of_the_umask(llama, trimaran, tmp_path):
    output = tmp_path / "engine"
    trimaran("build", "--checkpoint", llama().folder, "--output", output)
    modes = {path.name: path.stat().st_mode for path in output.iterdir()}
    assert modes["rank0.safetensors"] == modes["config.json"]


def test_shards_on_another_file_system_are_copied(llama, trimaran, tmp_path, monkeypatch):
    converted = tmp_path / "converted"
    trimaran("convert", "--model_dir", llama().folder, "--output_dir", converted)

    def cross_device(self, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("pathlib.Path.hardlink_to", cross_device)
    output = tmp_path / "engine"
    assert trimaran("build", "--checkpoint", converted, "--output", output).code == 0
    shutil.rmtree(converted)
    assert EngineFolder.load(output).weight_files[0].stat().st_nlink == 1


def test_linked_shards_are_replaced_by_their_files(llama, trimaran, tmp_path):
    converted, links = tmp_path / "converted", tmp_path / "links"
    trimaran("convert", "--model_dir", llama().folder, "--output_dir", converted)
    links.mkdir()
    shutil.copy(converted / "config.json", links)
    (links / "rank0.safetensors").symlink_to("../converted/rank0.safetensors")
    output = tmp_path / "engines" / "engine"
    done = trimaran("build", "--checkpoint", links, "--output", output)
    assert done.code == 0, done.err
    shutil.rmtree(converted)
    assert not EngineFolder.load(output).weight_files[0].is_symlink()


def test_limits_of_flags_override_the_file_and_the_file_overrides_defaults(
    llama, trimaran, tmp_path
):
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({
        "max_batch_size": 7, "max_input_len": 50, "plugin_config": {"tokens_per_block": 16},
    }))  # fmt: skip
    output = tmp_path / "engine"
    done = trimaran("build", "--checkpoint", llama().folder, "--output", output,
                    "--build_config", limits, "--max_input_len", 40)  # fmt: skip
    assert done.code == 0, done.err
    build = EngineFolder.load(output).build
    assert (build.max_batch_size, build.max_input_len) == (7, 40)
    assert (build.max_seq_len, build.max_num_tokens) == (128, 8192)
    assert build.tokens_per_block == 16


def test_an_engine_holds_no_tokens_per_block_unless_given(llama, trimaran, tmp_path):
    output = tmp_path / "engine"
    build = ("build", "--checkpoint", llama().folder, "--output", output)
    assert trimaran(*build).code == 0
    assert EngineFolder.load(output).build.plugin_config == {}
    assert trimaran(*build, "--tokens-per-block", "64").code == 0
    assert EngineFolder.load(output).build.tokens_per_block == 64


def test_the_legacy_output_length_sets_the_sequence_length(llama, trimaran, tmp_path):
    output = tmp_path / "engine"
    build = ("build", "--checkpoint", llama().folder, "--output", output, "--max_input_len", 40)
    trimaran(*build, "--max_output_len", 24)
    assert EngineFolder.load(output).max_seq_len == 64

    limits = tmp_path / "limits.json"
    limits.write_text('{"max_seq_len": 100}', encoding="utf-8-sig")
    assert trimaran(*build, "--max_output_len", 20, "--build_config", limits).code == 0
    assert EngineFolder.load(output).max_seq_len == 60
    done = trimaran(*build, "--max_output_len", 24, "--max_seq_len", 100)
    assert done.code == 2
    assert "--max-seq-len is 100 but --max-output-len 24 behind" in done.err


def test_the_legacy_output_length_alone_leaves_the_rest_of_the_positions_for_the_input(
    llama, trimaran, tmp_path
):
    output = tmp_path / "engine"
    build = ("build", "--checkpoint", llama().folder, "--output", output)
    assert trimaran(*build, "--max_output_len", 24).code == 0
    engine = EngineFolder.load(output)
    positions = engine.config.max_position_embeddings
    assert positions < 1024 + 24
    assert (engine.build.max_input_len, engine.max_seq_len) == (positions - 24, positions)


def test_a_size_that_contradicts_the_checkpoint_is_reported_as_written(
    llama, trimaran, tmp_path
):
    build = ("build", "--checkpoint", llama().folder, "--output", tmp_path / "engine")
    assert "--n_layer is 7 but " in trimaran(*build, "--n_layer", 7).err


def test_a_smaller_token_budget_lowers_the_default_batch(llama, trimaran, tmp_path):
    output = tmp_path / "engine"
    trimaran("build", "--checkpoint", llama().folder, "--output", output,
             "--max_num_tokens", 256)  # fmt: skip
    assert EngineFolder.load(output).build.max_batch_size == 256


def test_a_progress_bar_shows_on_a_terminal_after_a_second(tmp_path):
    code = (
        "import time; from trimaran.builder.progress import ProgressBar\n"
        "with ProgressBar(3 << 20) as bar:\n"
        "    for mib, text in enumerate(('early', 'later', 'last')):\n"
        "        bar.show(mib << 20, text); time.sleep(1.1)\n"
    )
    reader, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-P", "-c", code], stderr=terminal) as shows:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # a terminal without further input
            while part := os.read(reader, 1 << 16):
                shown += part
    os.close(reader)
    assert shows.returncode == 0
    shown = shown.decode()
    assert "later" in shown and "early" not in shown
    assert "2.0/3.0 MiB" in shown


def test_no_progress_bar_is_written_to_a_file(llama, trimaran, tmp_path):
    done = trimaran("build", "--checkpoint", llama().folder, "--output", tmp_path / "engine")
    assert done.err == ""
    assert done.out.count("\n") == 1
