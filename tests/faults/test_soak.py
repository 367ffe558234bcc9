"""The short form of the soak: three models, 64 clients, random kills, three minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import THREE_MODELS
from soak_run import Soak


@pytest.mark.timeout(600)
def test_three_models_keep_their_promises_under_random_kills(
    three_models: Path, tmp_path: Path
):
    report = Soak(three_models, THREE_MODELS, tmp_path, minutes=3.0).run()
    assert report["problems"] == []
    assert sum(kind["count"] for kind in report["faults"].values()) >= 3
    for figures in report["requests"].values():
        assert figures["outcomes"]["right"] > 20
