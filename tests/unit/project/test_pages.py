"""Pages: README.md lists every page, and the files that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PLACEHOLDER = re.compile(r"[A-Z]{2,}")
"""A part of a path that stands for a name, such as ``cases_AREA.py``."""

FOLDERS = "|".join(path.name for path in ROOT.iterdir() if path.is_dir())
NAMED_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./*-]+)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_the_readme_lists_every_page_under_use_operate_or_extend():
    groups = (ROOT / "README.md").read_text(encoding="utf-8").split("\n### ")[1:]
    assert [group.splitlines()[0] for group in groups] == [
        "Use", "Operate", "Understand and extend",
    ]  # fmt: skip
    listed = set(LINK.findall("".join(groups)))
    assert set(PAGES) - listed == set()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_the_files_that_a_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = [
        name
        for name in NAMED_FILE.findall(text)
        if not PLACEHOLDER.search(name)
        and not any(any(start.glob(name.rstrip("/"))) for start in (ROOT, ROOT / "tests/unit"))
    ]
    missing += [
        link for link in LINK.findall(text) if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert missing == []


def test_the_architecture_page_names_the_file_of_each_step_of_a_request():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\| (\d+) \| ([^|]*) \| [^|]*\|$", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    without = [number for number, files in steps if not NAMED_FILE.search(files)]
    assert steps and without == []
