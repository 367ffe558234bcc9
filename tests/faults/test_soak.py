"""The short form of the soak: 64 clients and random kills, three minutes for each layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import LAYOUTS, THREE_MODELS, Model, build_repository
from soak_run import Soak


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "models", [THREE_MODELS, LAYOUTS], ids=["ranks and replicas", "stages and dp ranks"]
)
def test_models_keep_their_guarantees_under_random_kills(
    models: tuple[Model, ...], tmp_path: Path
):
    repository = build_repository(tmp_path, models)
    report = Soak(repository, models, tmp_path, minutes=3.0).run()
    assert report["problems"] == []
    assert sum(kind["count"] for kind in report["faults"].values()) >= 3
    for figures in report["requests"].values():
        assert figures["outcomes"]["right"] > 20
