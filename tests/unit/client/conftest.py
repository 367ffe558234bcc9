"""Scripted servers, and the command line run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trimaran.launcher.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))

from scripted_server import ScriptedHttpServer, ScriptedServer


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A scripted gRPC server on a port of its own."""
    scripted = ScriptedServer()
    yield scripted
    scripted.stop()


@pytest.fixture
def trimaran(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command here; its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def http_server() -> Iterator[ScriptedHttpServer]:
    """A scripted HTTP server on a port of its own."""
    scripted = ScriptedHttpServer()
    yield scripted
    scripted.stop()


@pytest.fixture
def repo_root() -> Path:
    """The root of the working tree."""
    return Path(__file__).resolve().parents[3]
