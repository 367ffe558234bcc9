"""The output of a ready server, and the ready file."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
from pathlib import Path

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.comm.errors import ConfigError
from trimaran.launcher.cli.main import main
from trimaran.launcher.supervisor.readiness import announce, endpoint_lines, endpoint_urls


@pytest.fixture
def repository(tmp_path):
    """A repository whose model is an engine for two ranks."""
    engine = write_engine(tmp_path / "engine", tp_size=2)
    write_model(tmp_path / "repo" / "tensorrt_llm", gpt_model_path=str(engine))
    return tmp_path / "repo"


@pytest.mark.parametrize(
    ("address", "host"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", socket.gethostname())],
)
def test_the_ready_file_names_the_address_at_which_the_server_listens(
    repository, address, host
):
    flags = ("--http-address", address, "--grpc-address", address)
    urls = endpoint_urls(resolve(repository, *flags))
    assert (urls["http"], urls["grpc"]) == (f"http://{host}:8000", f"{host}:8001")


def test_a_full_disk_at_the_ready_file_is_reported_and_leaves_no_partial_file(
    repository, tmp_path, monkeypatch, caplog
):
    path = tmp_path / "ready.json"
    config = resolve(repository, "--ready-file", str(path))

    def write_text(file, text, encoding):
        file.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write_text)
    announce(config, print)
    assert f"{path} cannot be written (No space left on device)" in caplog.text
    assert list(tmp_path.glob("ready*")) == []


@pytest.fixture
def text_repository(tmp_path):
    """A repository with an ensemble that takes texts."""
    engine = write_engine(tmp_path / "engine", tp_size=2)
    fill = f"engine_dir:{engine},tokenizer_dir:{tmp_path}"
    assert main(["init-repo", str(tmp_path / "texts"), "--defaults", "--fill", fill]) == 0
    return tmp_path / "texts"


def test_the_printed_request_has_the_operators_prompt_as_the_shell_takes_it(
    text_repository, tmp_path
):
    prompt = '<|user|>\nWhat\'s "learning"?\n<|assistant|>\n'
    (tmp_path / "prompt.txt").write_text(prompt)
    config = resolve(text_repository, "--example-prompt", str(tmp_path / "prompt.txt"))
    words = shlex.split(endpoint_lines(config)[-1])
    assert words[:-2] == ["curl", "-X", "POST", "localhost:8000/v2/models/ensemble/generate"]
    assert json.loads(words[-1])["text_input"] == prompt


def test_a_prompt_file_that_is_not_there_is_refused(text_repository, tmp_path):
    with pytest.raises(ConfigError, match=r"--example-prompt .*nowhere: cannot be read"):
        resolve(text_repository, "--example-prompt", str(tmp_path / "nowhere"))


def test_a_model_with_a_chat_template_is_asked_by_a_chat_and_shown_on_a_page(
    text_repository, tmp_path
):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    *_, line, page = endpoint_lines(resolve(text_repository, "--openai-port", "9000"))
    words = shlex.split(line)
    assert words[:-2] == ["curl", "-X", "POST", "localhost:9000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["messages"][0]["role"]) == ("ensemble", "user")
    assert page == "A page to try it: http://localhost:9000/chat"


@pytest.mark.parametrize("settings", [None, "{}", "no JSON"])
def test_a_model_without_a_chat_template_is_asked_to_continue_a_text(
    settings, text_repository, tmp_path
):
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    *_, line, _ = endpoint_lines(resolve(text_repository, "--openai-port", "9000"))
    words = shlex.split(line)
    assert words[3] == "localhost:9000/v1/completions"
    assert json.loads(words[-1])["prompt"] == "What is machine learning?"
