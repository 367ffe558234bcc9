"""The page of compatibility is what its tests write when all pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

GENERATOR = Path(__file__).resolve().parents[2] / "clients" / "generate.py"


@pytest.fixture(scope="module")
def generator():
    """The program that writes the page, under a name of its own."""
    spec = importlib.util.spec_from_file_location("compatibility_page", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(generator, was="passed"):
    """A report in which each cell of the page had this outcome."""
    return [
        [version, row.table, number, was]
        for version in generator.VERSIONS
        for number, row in enumerate(generator.ROWS)
        if row.is_for(version)
    ]


def test_the_page_has_each_row_of_the_tests_for_each_version(generator):
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(report(generator))


def test_a_row_that_failed_or_did_not_run_stops_the_page(generator):
    with pytest.raises(generator.NotShown, match=r"repository of 0\.5: failed"):
        generator.page(report(generator, "failed"))
    with pytest.raises(generator.NotShown, match=r"repository of 0\.18: did not run"):
        generator.page([row for row in report(generator) if row[0] != "0.18"])
