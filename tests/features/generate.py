"""Writes docs/features.md from the product's tables and the outcomes of marked tests."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import catalogue

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "features.md"
GOOD = {"passed", "collected"}
HEAD = """# Every input, output and parameter

What each name of the models' interfaces does here, and the tests that fail when its value is
dropped between configuration or wire and engine. `make features` runs them and writes this
page; names are those of the templates (`trimaran init-repo`).

- *served*: it takes effect;
- *no effect*: it is taken and changes nothing, for the reason given;
- *refused*: a request or a configuration that sets it fails, for the reason given;
- *never comes*: an output of what is refused.

More is in [decoding.md](decoding.md), [outputs.md](outputs.md),
[guided-decoding.md](guided-decoding.md), [lora.md](lora.md), [kv-cache.md](kv-cache.md) and
[engine.md](engine.md).
"""


class NotShown(Exception):
    """The page's texts and the marked tests contradict each other."""


def page(report: Mapping[str, Mapping[str, str]]) -> str:
    """The page's text.

    Args:
        report: of each feature the tests, and what became of each.

    Raises:
        NotShown: a test failed, a row has none, or a mark names no row.
    """
    tables = catalogue.tables()
    rows = {row.feature: row for table in tables for row in table.rows}
    complaints = [f"{name}: a test is marked for it, but there is no such row"
                  for name in report if name not in rows]  # fmt: skip
    for name, row in rows.items():
        outcomes = report.get(name, {})
        complaints += [f"{name}: {test} {was}" for test, was in outcomes.items()
                       if was not in GOOD]  # fmt: skip
        if not outcomes and row.effect != catalogue.NEVER:
            complaints.append(f"{name} ({row.effect}): no test is marked for it")
    if complaints:
        raise NotShown("\n".join(complaints))
    numbers = _numbers(report)
    parts = [HEAD]
    for table in tables:
        parts.append(f"## {table.title}\n")
        parts.append("| name | | what it does | shown by |\n| --- | --- | --- | --- |")
        for row in table.rows:
            shown = sorted({numbers[_function(test)] for test in report.get(row.feature, ())})
            tests = ", ".join(map(str, shown))
            parts.append(f"| `{row.name}` | {row.effect} | {row.text} | {tests} |")
        parts.append("")
    parts.append("## Tests\n")
    for test, number in numbers.items():
        path, name = test.split("::")
        title = name.removeprefix("test_").replace("_", " ")
        parts.append(f"{number}. [{path.removeprefix('tests/')}](../{path}): {title}")
    return "\n".join(parts) + "\n"


def _function(test: str) -> str:
    """A test without its case."""
    return test.split("[", 1)[0]


def _numbers(report: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    names = sorted({_function(test) for tests in report.values() for test in tests})
    return {name: number for number, name in enumerate(names, 1)}


def main() -> None:
    """Write the page, or say why not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what `pytest --features-report` wrote")
    arguments = parser.parse_args()
    try:
        PAGE.write_text(page(json.loads(arguments.report.read_text())), encoding="utf-8")
    except NotShown as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
