"""The words of comments, docstrings, pages and names: terms of the field, no persons."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rules = sys.modules.get("rules") or _load("rules")
prose = _load("prose")

PERSONS = r"\b(?:nobody|whoever|somebody|anybody|someone|anyone|who|whom|knows|does without)\b"
REPLACED = r"\bthe (?:replaced|old) system\b"
OF = r"(?-i:Of [a-z])"
OLD_PROSE = re.compile(f"{PERSONS}|{REPLACED}|(?:^|[.:] ){OF}", re.IGNORECASE)
"""Persons for objects, a name without its owner, and sentences whose subject is not first."""

MAY_HAVE_OLD_PROSE = re.compile(f"{PERSONS}|{REPLACED}|{OF}", re.IGNORECASE)
"""What a whole file is searched for first: finding comments takes ten times as long."""

_OLD = "outlook|remember|remembered|remembering|remembers"
OLD_NAMES = re.compile(f"(^|_)({_OLD})(_|$)", re.IGNORECASE)
"""Parts of names for which the field has terms: forecast, saved state, cache."""

MAY_HAVE_OLD_NAMES = re.compile(_OLD, re.IGNORECASE)
"""What a whole file is searched for before the file is parsed."""


def _files(*suffixes):
    listed = rules.tracked_files(*(f"*{suffix}" for suffix in suffixes))
    return [path for path in listed if path != Path(__file__)]


@pytest.mark.parametrize("suffixes", [(".py",), prose.C_SOURCES, (".md",)])
def test_prose_names_objects_and_begins_with_the_subject(suffixes):
    old = [
        f"{path.relative_to(rules.ROOT)}:{number}: {line}"
        for path in _files(*suffixes)
        if MAY_HAVE_OLD_PROSE.search(path.read_text(encoding="utf-8"))
        for number, line in prose.lines_of(path)
        if OLD_PROSE.search(line)
    ]
    assert old == []


def test_names_are_terms_of_the_field():
    old = [
        f"{rules.where(source, node)} {name}"
        for source in rules.sources(*rules.PACKAGES)
        if MAY_HAVE_OLD_NAMES.search(source.text)
        for node in ast.walk(source.tree)
        for name in _defined(node)
        if OLD_NAMES.search(name)
    ]
    assert old == []


def _defined(node):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.arg | ast.keyword):
        return [node.arg or ""]
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.id if isinstance(node, ast.Name) else node.attr]
    return []


@pytest.mark.parametrize(
    ("suffix", "text", "found"),
    [
        (".py", "x = 1  # Somebody waits.\n", [(1, "Somebody waits.")]),
        (".py", 'def f():\n    """A `b`.\n\n    C.\n    """\n', [(2, "A ``."), (4, "C.")]),
        (".cu", "int x;  // Of this block.\n", [(1, "Of this block.")]),
        (".md", "A line.\n\n    who\n", [(1, "A line.")]),
    ],
)  # fmt: skip
def test_prose_is_found_in_comments_docstrings_and_pages(tmp_path, suffix, text, found):
    path = tmp_path / f"file{suffix}"
    path.write_text(text)
    assert [line for line in prose.lines_of(path) if line[1]] == found
