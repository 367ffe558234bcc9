"""Shared by the fault tests: the harness of the end-to-end tests."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS / "faults"), str(_TESTS / "e2e")]
