"""Marks say which features a test shows; `--features-report FILE` writes them with outcomes."""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

SECTIONS = ("token", "text", "preprocessing", "postprocessing", "request")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the report."""
    parser.addoption(
        "--features-report",
        type=Path,
        metavar="FILE",
        help="write what became of the tests of each feature, as JSON",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run every case of tests marked `matrix`, not only the cases that they keep",
    )


def _use_own_cache() -> None:
    """Keep the tokenizers of tests out of the user's cache, which forgets the oldest of 64.

    Compiled kernels and packages are shared with the user.
    """
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # The same for all processes: TMPDIR is another folder in each session of MPI.
    own = Path("/var/tmp") / f"trimaran-tests-{os.getuid()}"
    if users == own:
        return
    (own / "trimaran").mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in ("pip", "trimaran/kernels"):
        (users / name).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (own / name).symlink_to(users / name)
    os.environ["XDG_CACHE_HOME"] = str(own)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report only on request; parallel processes keep separate files."""
    # Where the user has no writable cache, there are no tokenizers to keep.
    with suppress(OSError, RuntimeError):
        _use_own_cache()
    # Garbage collection is off until the tests are collected: imports create millions of
    # objects and no garbage.
    gc.disable()
    is_worker = hasattr(config, "workerinput")
    is_rank = "OMPI_COMM_WORLD_RANK" in os.environ and config.option.basetemp is None
    if is_worker or is_rank:
        # Ranks that end together would clean pytest's common folder concurrently; the folder
        # that pytest-xdist gives a worker is too long for paths of Unix sockets.
        config.option.basetemp = tempfile.mkdtemp(prefix="pytest-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    path = config.getoption("--features-report")
    if path is not None and is_worker:
        raise pytest.UsageError("--features-report needs all tests in one process: without -n")
    if path is not None:
        config.pluginmanager.register(_Report(path), "features-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the selected cases of each test marked `matrix`, spread over all of them.

    ``keep=0`` keeps a rare path, a test or one of its cases, for ``make test-models`` alone.
    The smallest of several marks counts.
    """
    if config.getoption("--all-cases"):
        return
    matrices: dict[str, list[pytest.Item]] = {}
    counts: dict[str, int] = {}
    left_out: set[pytest.Item] = set()
    for item in items:
        keep = min((mark.kwargs["keep"] for mark in item.iter_markers("matrix")), default=None)
        if keep == 0:
            left_out.add(item)
        elif keep is not None:
            test = item.nodeid.partition("[")[0]
            counts[test] = keep
            matrices.setdefault(test, []).append(item)
    for test, cases in matrices.items():
        count = min(counts[test], len(cases))
        kept = {cases[index * len(cases) // count] for index in range(count)}
        left_out.update(case for case in cases if case not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep imported modules and the tests themselves out of every garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


class _Report:
    """The marked tests of each feature, and whether all their cases passed."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._tests: dict[str, dict[str, str]] = {}
        self._outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the marks of every test that is to run."""
        for item in session.items:
            for feature in features_of(item):
                self._tests.setdefault(feature, {})[item.nodeid] = "collected"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note an outcome; a failure stays one."""
        if self._outcomes.get(report.nodeid) != "failed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write the report."""
        report = {
            feature: {test: self._outcomes.get(test, state) for test, state in tests.items()}
            for feature, tests in sorted(self._tests.items())
        }
        self._path.write_text(json.dumps(report, indent=1) + "\n")


def features_of(item: pytest.Item) -> list[str]:
    """``section kind:name`` of every mark; the section defaults to the token model."""
    found = []
    for mark in item.iter_markers("feature"):
        section = mark.kwargs.get("of", "token")
        if section not in SECTIONS:
            raise pytest.UsageError(f"{item.nodeid}: no section is called {section!r}")
        found += [f"{section} {name}" for name in mark.args]
    return found
