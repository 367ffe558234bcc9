"""fill-template and init-repo behave like the tools of Triton's TensorRT-LLM backend,
escapes included.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trimaran.launcher.cli import init_repo
from trimaran.launcher.cli.fill_template import parse_substitutions
from trimaran.launcher.cli.main import main
from trimaran.server.repository.model_repository import ModelRepository


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a:1,b:two", {"a": "1", "b": "two"}),
        (r"gpu_device_ids:0\,1", {"gpu_device_ids": "0,1"}),
        (r"gpu_device_ids:0\,1;2\,3", {"gpu_device_ids": "0,1;2,3"}),
        (r"url:http\\://host", {"url": "http://host"}),
        ("empty:", {"empty": ""}),
    ],
)
def test_commas_and_colons_are_escaped_as_documented(text, values):
    assert parse_substitutions(text) == values


@pytest.mark.parametrize("text", ["a", "a:1:2", "a:1,,b:2", r"url:http\://host"])
def test_a_part_that_is_not_key_and_value_is_refused(tmp_path, capsys, text):
    path = tmp_path / "t"
    path.write_text("a b url")

    assert main(["fill-template", str(path), text]) == 2
    assert "is not key:value" in capsys.readouterr().err


def test_without_in_place_the_result_is_printed_and_the_file_kept(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text("x: ${a} $b ${c} $$\n")

    assert main(["fill-template", str(path), "a:1,b:2"]) == 0

    assert capsys.readouterr().out == "x: 1 2 ${c} $\n"
    assert path.read_text() == "x: ${a} $b ${c} $$\n"


@pytest.mark.parametrize("flag", ["-i", "--in_place", "--in-place"])
def test_the_flag_in_place_overwrites_the_file(tmp_path, capsys, flag):
    path = tmp_path / "t"
    path.write_text("x: ${a}")

    assert main(["fill-template", flag, str(path), "a:1"]) == 0

    assert path.read_text() == "x: 1"
    assert capsys.readouterr().out == ""


@pytest.fixture
def full_disk(monkeypatch):
    """Let every file accept four bytes, and then fail without a file name, like the system."""

    def write_text(path, text, encoding=None):
        path.write_bytes(text[:4].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_full_disk_leaves_the_file_unchanged(tmp_path, capsys, full_disk):
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b"x: ${a}")
    assert main(["fill-template", "-i", str(path), "a:1"]) == 2
    assert capsys.readouterr().err == (
        f"trimaran: error: cannot write {path}: No space left on device\n"
    )
    assert path.read_text() == "x: ${a}"
    assert list(tmp_path.iterdir()) == [path]


def test_a_filled_file_keeps_its_permissions_and_links(tmp_path):
    path, link = tmp_path / "t", tmp_path / "link"
    path.write_text("x: ${a}")
    path.chmod(0o640)
    link.symlink_to("t")
    assert main(["fill-template", "-i", str(link), "a:1"]) == 0
    assert link.is_symlink()
    assert path.read_text() == "x: 1"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_in_a_read_only_folder_is_filled(tmp_path, monkeypatch):
    path = tmp_path / "t"
    path.write_text("x: ${a}")

    def replace(part, target):
        raise OSError(errno.EBUSY, "Device or resource busy", str(target))

    monkeypatch.setattr(Path, "replace", replace)
    assert main(["fill-template", "-i", str(path), "a:1"]) == 0
    assert path.read_text() == "x: 1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_text_is_refused(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_bytes(b"a \xff")
    assert main(["fill-template", "-i", str(path), "a:1"]) == 2
    assert f"error: cannot read {path}: 'utf-8' codec" in capsys.readouterr().err


def test_a_pipe_is_not_filled_in_place(tmp_path, capsys):
    path = tmp_path / "config.pbtxt"
    os.mkfifo(path)
    assert main(["fill-template", "-i", str(path), "a:1"]) == 2
    assert f"cannot read {path}: it is a FIFO, not a file" in capsys.readouterr().err


def test_queue_limits_have_defaults(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text("${max_queue_size} ${max_queue_delay_microseconds} ${other} other")

    main(["fill-template", str(path), "other:7"])

    assert capsys.readouterr().out == "0 0 7 other"


def test_a_key_must_occur_in_the_file_filled_or_not(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text('key: "engine_dir" value: "${engine_dir}" size: ${size}')

    assert main(["fill-template", "-i", str(path), "engine_dir:/a,size:1"]) == 0
    assert main(["fill-template", "-i", str(path), "engine_dir:/b"]) == 0
    assert main(["fill-template", "-i", str(path), "sizes:1"]) == 2
    assert f"key 'sizes' does not exist in the file {path}." in capsys.readouterr().err


def test_a_key_with_a_filled_placeholder_is_reported_as_unused(tmp_path, capsys):
    path = tmp_path / "t"
    path.write_text("max_queue_size: ${max_queue_size} size: $size key: a $$key")

    main(["fill-template", "-i", str(path), "size:1"])
    assert capsys.readouterr().err == ""
    assert main(["fill-template", "-i", str(path), "max_queue_size:2"]) == 0
    told = f"{path} has no ${{max_queue_size}} left to fill: what stands there stays"
    assert told in capsys.readouterr().err
    assert "max_queue_size: 0" in path.read_text()


def test_init_repo_writes_five_models_and_keeps_existing_files(tmp_path, capsys):
    root = tmp_path / "repo"

    assert main(["init-repo", str(root)]) == 0

    assert {path.parent.name for path in root.glob("*/config.pbtxt")} == set(init_repo.MODELS)
    assert all((root / model / "1").is_dir() for model in init_repo.MODELS)
    assert "${engine_dir}" in (root / "tensorrt_llm" / "config.pbtxt").read_text()
    assert main(["init-repo", str(root)]) == 2
    assert "exists. Remove it, or overwrite it with --force." in capsys.readouterr().err
    assert main(["init-repo", str(root), "--force", "--models", "ensemble"]) == 0


@pytest.mark.parametrize("flags", [[""], ["repository", "--scripts", ""]])
def test_init_repo_refuses_an_empty_name(tmp_path, monkeypatch, capsys, flags):
    monkeypatch.chdir(tmp_path)
    assert main(["init-repo", *flags]) == 2
    assert "is empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_init_repo_fills_each_model_that_has_the_placeholder(tmp_path):
    root = tmp_path / "repo"

    assert main(["init-repo", str(root), "--fill", "engine_dir:/e,bls_instance_count:3"]) == 0

    assert '"/e"' in (root / "tensorrt_llm" / "config.pbtxt").read_text()
    assert "count: 3" in (root / "tensorrt_llm_bls" / "config.pbtxt").read_text()


def test_defaults_fill_all_placeholders_and_given_values_override_defaults(tmp_path, capsys):
    given = "triton_max_batch_size:7,tokenizer_dir:/t,engine_dir:/e"
    assert main(["init-repo", str(tmp_path), "--defaults", "--fill", given]) == 0
    assert "to fill in" not in capsys.readouterr().out
    models = ModelRepository.load(tmp_path).models.values()
    assert {model.config.max_batch_size for model in models} == {7}


def test_init_repo_refuses_a_fill_key_that_no_template_has(tmp_path, capsys):
    assert main(["init-repo", str(tmp_path / "r"), "--fill", "engin_dir:/e"]) == 2
    assert "no template has the placeholder ${engin_dir}" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.matrix(keep=8)
@pytest.mark.parametrize("path", list(init_repo.SCRIPTS))
def test_the_documented_scripts_run_their_command(tmp_path, path):
    main(["init-repo", str(tmp_path / "repo"), "--scripts", str(tmp_path)])

    done = subprocess.run(
        [sys.executable, "-P", str(tmp_path / path), "--help"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0
    assert f"usage: trimaran {' '.join(init_repo.SCRIPTS[path])}" in done.stdout


@pytest.mark.parametrize("path", ["scripts/launch_triton_server.py", "bin/tritonserver"])
def test_the_scripts_that_serve_have_the_documented_process_name(tmp_path, path):
    main(["init-repo", str(tmp_path / "repo"), "--scripts", str(tmp_path)])
    # A configuration that never ends to be read keeps the process from its end.
    os.mkfifo(tmp_path / "flags.yaml")
    command = [sys.executable, "-P", str(tmp_path / path), "--config"]

    with subprocess.Popen([*command, str(tmp_path / "flags.yaml")]) as server:
        with (tmp_path / "flags.yaml").open("w"):
            assert psutil.Process(server.pid).name() == "tritonserver"
            server.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "flags", [["{file}/repo"], ["{file}.repo", "--scripts", "{file}/scripts"]]
)
def test_init_repo_names_a_path_that_cannot_be_written(tmp_path, capsys, flags):
    file = tmp_path / "file"
    file.touch()
    assert main(["init-repo", *(flag.format(file=file) for flag in flags)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"trimaran: error: {file}/")
    assert error.endswith("Name a folder that can be written.")


def test_init_repo_on_a_full_disk_names_the_file_and_leaves_no_partial_file(
    tmp_path, capsys, full_disk
):
    assert main(["init-repo", str(tmp_path)]) == 2
    path = tmp_path / "ensemble" / "config.pbtxt"
    assert capsys.readouterr().err == (
        f"trimaran: error: {path}: No space left on device. Name a folder that can be "
        "written.\n"
    )
    assert [each.name for each in path.parent.iterdir()] == ["1"]


def test_init_repo_lists_unfilled_placeholders(tmp_path, capsys):
    main(["init-repo", str(tmp_path), "--fill", "triton_max_batch_size:4,decoupled_mode:True"])

    lines = capsys.readouterr().out.splitlines()[1:]
    folders = {
        "ensemble": "logits_datatype",
        "preprocessing": "preprocessing_instance_count",
        "tensorrt_llm": "encoder_input_features_data_type, logits_datatype",
        "postprocessing": "postprocessing_instance_count",
        "tensorrt_llm_bls": "logits_datatype, bls_instance_count",
    }
    assert lines == [
        f"to fill in {tmp_path}/{name}/config.pbtxt: {keys}" for name, keys in folders.items()
    ]
