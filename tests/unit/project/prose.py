"""The prose of tracked files: comments and docstrings of sources, and text of pages."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

C_SOURCES = (".cpp", ".cu", ".cuh", ".h")

Line = tuple[int, str]
"""A line's number from 1, and its prose without marks of comments."""


def lines_of(path: Path) -> Iterator[Line]:
    """The prose of a Python, C++ or CUDA source or of a page, without code in backticks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = _of_python(text)
    elif path.suffix in C_SOURCES:
        found = _of_c(text)
    else:
        found = _of_page(text)
    for number, line in found:
        yield number, re.sub(r"`+[^`]*`+", "``", line)


def _of_python(text: str) -> Iterator[Line]:
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            for index, line in enumerate(value.value.splitlines()):
                yield value.lineno + index, line.strip()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def _of_c(text: str) -> Iterator[Line]:
    for number, line in enumerate(text.splitlines(), 1):
        _, mark, comment = line.partition("//")
        if mark:
            yield number, comment.strip()


def _of_page(text: str) -> Iterator[Line]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line.strip(" |")
