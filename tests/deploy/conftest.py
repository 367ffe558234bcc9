"""Servers and programs that the deployment tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
E2E = HERE.parent / "e2e"
sys.path[:0] = [str(HERE), str(E2E), str(HERE.parent / "unit" / "project")]

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

from tools import program  # noqa: E402


@pytest.fixture(scope="session")
def chromium() -> str:
    """A real browser."""
    return program("chromium", "chromium")


@pytest.fixture(scope="session")
def text_browser() -> str:
    """A browser that shows text alone."""
    return program("w3m", "w3m")
