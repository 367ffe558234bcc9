"""Servers and programs that the deployment tests share."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
E2E = HERE.parent / "e2e"
sys.path[:0] = [str(HERE), str(E2E)]

# The engines, repositories and servers of the end-to-end tests.
_spec = importlib.util.spec_from_file_location("e2e_conftest", E2E / "conftest.py")
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)
build_engine, make_repository, demo_engine = (
    _e2e.build_engine,
    _e2e.make_repository,
    _e2e.demo_engine,
)


def program(name: str, package: str) -> str:
    """A program's path; as root on Debian it is installed first if it is missing."""
    if shutil.which(name) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], env=env, check=True, timeout=300)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package],
            env=env, check=True, timeout=600, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    path = shutil.which(name)
    assert path is not None, f"{name} is missing: apt-get install {package}"
    return path


@pytest.fixture(scope="session")
def chromium() -> str:
    """A real browser."""
    return program("chromium", "chromium")


@pytest.fixture(scope="session")
def text_browser() -> str:
    """A browser that shows text alone."""
    return program("w3m", "w3m")
