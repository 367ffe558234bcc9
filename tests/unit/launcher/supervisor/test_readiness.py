"""The output of a ready server, and the ready file."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
from launcher_repository import resolve, write_engine, write_model

from trimaran.launcher.supervisor.readiness import announce, endpoint_urls


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
