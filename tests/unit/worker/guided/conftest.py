"""No test of guides leaves a process."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(scope="module", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fail where an engine or a compiler of a module is not closed at its end."""
    before = psutil.Process().children()
    yield
    left = [p for p in psutil.Process().children() if p not in before]
    guides = [p.pid for p in left if any("guide_process" in word for word in p.cmdline())]
    assert not guides, f"processes of guides are left: {guides}"
