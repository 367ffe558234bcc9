"""The table of models and layouts has a cell for every test of them."""

from __future__ import annotations

import pytest

from tests.models.families import family_configs
from tests.models.generate import PAGE, NotShown, reports, table, with_table
from tests.models.layouts import LAYOUTS, applies


@pytest.fixture
def report():
    """A report in which every test has passed on a CPU."""
    passed = {
        name: {layout: "passed" for layout in LAYOUTS if applies(layout, config)}
        for name, config in family_configs().items()
    }
    return {"CPU": passed, **reports()}


def test_the_page_has_the_table_of_the_models_and_layouts_that_are_tested(report):
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, report) == page, "docs/models.md is old: make test-models"


@pytest.mark.parametrize("outcome", ["failed", ""])
def test_a_layout_without_a_passing_test_stops_the_page(report, outcome):
    report["CPU"]["falcon"]["tp4"] = outcome
    with pytest.raises(NotShown, match="falcon in tp4"):
        table(report)
