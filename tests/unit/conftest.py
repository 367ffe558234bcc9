"""Settings of all unit tests."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton reads this when kernels are defined: its interpreter runs them without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

LONGEST = (
    "worker/guided/test_guide_processes.py", "server/fleet", "project", "server/loading",
    "launcher/supervisor", "worker/guided", "worker/sampling", "worker/engine",
    "worker/scheduling", "kernels/cuda", "builder", "server/test_process.py",
    "worker/models/test_parity.py", "kernels/triton", "bench",
)  # fmt: skip
"""Folders and files whose tests take longest, longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: processes of pytest-xdist then end together."""
    here = Path(__file__).parent

    @functools.cache
    def rank(path: Path) -> int:
        ranks = (n for n, name in enumerate(LONGEST) if path.is_relative_to(here / name))
        return next(ranks, len(LONGEST))

    items.sort(key=lambda item: rank(item.path))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Random draws and log settings of earlier tests do not affect a test."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
