"""Settings of all unit tests."""

import logging
import os
import sys
from collections.abc import Iterator

import pytest

# Triton reads this when kernels are defined: its interpreter runs them without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


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
