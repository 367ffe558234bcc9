"""What the fault tests share: the harness of the end-to-end tests, and three models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "faults"), str(_TESTS / "e2e")]

from models import THREE_MODELS, build_repository  # noqa: E402


@pytest.fixture(scope="session")
def three_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of three models: of two ranks, of one, and of two replicas."""
    return build_repository(tmp_path_factory.mktemp("three"), THREE_MODELS)
