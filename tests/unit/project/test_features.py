"""The page of features agrees with the templates and the marked tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "features"))

import catalogue
import generate

from tests.conftest import features_of

ROOT = generate.ROOT


@pytest.fixture(scope="module")
def report(request, tmp_path_factory):
    """The marks of all unit tests, from this session if it has collected all. No test runs."""
    path = tmp_path_factory.mktemp("features") / "report.json"
    files = [
        file
        for file in sorted((ROOT / "tests" / "unit").rglob("test_*.py"))
        if "mark.feature(" in file.read_text(encoding="utf-8") and file != Path(__file__)
    ]
    collected = request.session.items
    if _are_whole_files(request.config) and {item.path for item in collected}.issuperset(files):
        return _marks(item for item in collected if item.path != Path(__file__))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "feature",
         "--features-report", str(path), *map(str, files)],
        cwd=ROOT,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def _are_whole_files(config):
    """Whether the command line selects files and folders, and no tests inside files."""
    options = ("keyword", "markexpr", "deselect", "lf")
    return not any(config.getoption(name, None) for name in options) and not any(
        "::" in arg for arg in config.args
    )


def _marks(items):
    """The report of these tests."""
    report = {}
    for item in items:
        for feature in features_of(item):
            report.setdefault(feature, {})[item.nodeid] = "collected"
    return dict(sorted(report.items()))


def test_the_page_of_features_matches_the_tables_and_marks(report):
    assert generate.PAGE.read_text(encoding="utf-8") == generate.page(report), (
        "docs/features.md is old: make features"
    )


def test_every_name_of_the_templates_has_a_row():
    rows = {row.feature for table in catalogue.tables() for row in table.rows}
    placeholders = catalogue.placeholders()
    keys = {key for keys in placeholders.values() for key in keys}
    known = {feature.split(":", 1)[1] for feature in rows}
    assert keys <= known
    assert {name for name, keys in placeholders.items() if not keys} <= known


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token input:temperature": {}}, r"temperature \(served\): no test is marked for it"),
        ({"token input:medusa": {"a.py::b": "passed"}}, "there is no such row"),
        (
            {"token input:temperature": {"a.py::b[1]": "failed"}},
            r"temperature: a.py::b\[1\] failed",
        ),
    ],
)
def test_a_feature_without_a_passing_test_stops_the_page(report, changes, complaint):
    with pytest.raises(generate.NotShown, match=complaint):
        generate.page({**report, **changes})
