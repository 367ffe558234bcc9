"""Writes the table of docs/models.md from the outcome of each model in each layout."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if "tests" not in sys.modules:
    # Not by way of the path, where our folders would pass for packages of the same names.
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]

from tests.models.families import family_configs  # noqa: E402
from tests.models.layouts import LAYOUTS, applies  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- written by make test-models -->\n", "<!-- end -->\n"
MEASURED = ROOT / "benchmarks" / "results"
"""Has the reports of other devices: ``models-*.json``."""

Report = dict[str, dict[str, dict[str, str]]]
"""By device, model and layout: what became of the test."""


class NotShown(Exception):
    """A model was not shown to run in a layout that applies to it."""


def reports(*paths: Path) -> Report:
    """These reports, merged with reports of other devices."""
    whole: Report = {}
    for path in (*paths, *sorted(MEASURED.glob("models-*.json"))):
        for device, models in json.loads(path.read_text(encoding="utf-8")).items():
            whole.setdefault(device, {}).update(models)
    return whole


def table(report: Report) -> str:
    """One row a model, one column a layout; a cell names the devices.

    Raises:
        NotShown: a test failed, or did not run on a device that ran others of the model with as
            many ranks; or no device ran it.
    """
    sizes = {device: _world_sizes(models) for device, models in report.items()}
    lines = [
        "| model | architecture | " + " | ".join(LAYOUTS) + " |",
        "| --- | --- |" + " --- |" * len(LAYOUTS),
    ]
    complaints = []
    for name, config in family_configs().items():
        cells = []
        for layout in LAYOUTS:
            outcomes = {
                device: models.get(name, {}).get(layout, "")
                for device, models in report.items()
            }
            cells.append(_cell(outcomes) if applies(layout, config) else "–")
            due = [
                outcome
                for device, outcome in outcomes.items()
                if name in report[device] and LAYOUTS[layout].world_size in sizes[device]
            ]
            if cells[-1] != "–" and (not cells[-1] or set(due) != {"passed"}):
                complaints.append(f"{name} in {layout}: {outcomes or 'did not run'}")
        architecture = type(config).__name__.removesuffix("Config")
        lines.append(f"| {name} | {architecture} | " + " | ".join(cells) + " |")
    if complaints:
        raise NotShown("\n".join(complaints))
    return "\n".join(lines) + "\n"


def _world_sizes(models: dict[str, dict[str, str]]) -> set[int]:
    """Numbers of ranks that a device ran anything with."""
    ran = {name for layouts in models.values() for name, outcome in layouts.items() if outcome}
    return {LAYOUTS[name].world_size for name in ran}


def _cell(outcomes: dict[str, str]) -> str:
    return ", ".join(device for device, outcome in outcomes.items() if outcome == "passed")


def with_table(text: str, report: Report) -> str:
    """The page's text with its table written anew."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table(report) + END + tail


def main() -> None:
    """Write the table, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `pytest --models-report` wrote")
    arguments = parser.parse_args()
    try:
        page = with_table(PAGE.read_text(encoding="utf-8"), reports(arguments.report))
    except NotShown as error:
        sys.exit(str(error))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
