"""The house rules on size and imports, as functions over the tracked source files."""

from __future__ import annotations

import ast
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "bench",
    "builder", "client", "comm", "kernels", "launcher", "orchestrator", "server", "slurm",
    "worker",
)  # fmt: skip
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8
MAX_NESTING = 4

MAX_MODULES = 25
MIN_ROOM_LINES = 3


@dataclass(frozen=True, eq=False)
class Source:
    """One tracked Python file of a package."""

    path: Path
    package: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)

    @functools.cached_property
    def num_lines(self) -> int:
        """Lines of the text."""
        return self.text.count("\n")


def tracked_files(*patterns: str) -> list[Path]:
    """Files that git tracks. New ones count from `git add` on: others may be anything, such as
    the log of the tests that are running."""
    listing = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return sorted({ROOT / line for line in listing.splitlines() if (ROOT / line).is_file()})


def sources(*folders: str) -> list[Source]:
    """The Python files below these top-level folders."""
    return [_source(path) for path in tracked_files(*(f"{folder}/*.py" for folder in folders))]


def package_files() -> list[Path]:
    """The Python files of all packages."""
    return [source.path for source in sources(*PACKAGES)]


@functools.cache
def _source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    package = path.relative_to(ROOT).parts[0]
    return Source(path, package, text)


def functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    return [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def is_device_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function runs on a GPU, where arguments are pointers and numbers alone."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(decorator.startswith("triton.jit") for decorator in decorators)


def where(source: Source, node: ast.AST) -> str:
    """A place as file:line, to click on."""
    return f"{source.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest nesting of control flow below a function."""
    control = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        is_elif = (
            isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
        )
        deeper = depth + 1 if isinstance(child, control) and not is_elif else depth
        deepest = max(deepest, nesting(child, deeper))
    return deepest
