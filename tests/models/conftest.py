"""Run under MPI, once for each number of ranks: ``make test-models``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.group_run import HAS_GPUS
from trimaran.comm import mpi

torch.set_num_threads(1)

_SIZE = mpi.MPI.COMM_WORLD.Get_size()
# Models of the first run on one rank; the second takes its time on more than two.
collect_ignore = ["test_config_fields.py"] if _SIZE > 1 else []
if _SIZE > 2:
    collect_ignore.append("test_drawn_configs.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the report."""
    parser.addoption(
        "--models-report",
        type=Path,
        metavar="FILE",
        help="add what became of each model in each layout to this JSON file",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Switch on what pytest-mpi leaves out by default; report on rank 0 alone."""
    config.option.with_mpi = True
    path = config.getoption("--models-report")
    if path is not None and mpi.MPI.COMM_WORLD.Get_rank() == 0:
        config.pluginmanager.register(_Report(path), "models-report")


class _Report:
    """The outcome of each model in each layout."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._outcomes: dict[str, dict[str, str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        """Note an outcome; a failure stays one."""
        report = yield
        parameters = item.callspec.params  # type: ignore[attr-defined]
        if "layout" not in parameters:
            return report
        layouts = self._outcomes.setdefault(parameters["model"], {})
        if layouts.get(parameters["layout"]) != "failed":
            layouts[parameters["layout"]] = report.outcome
        return report

    def pytest_sessionfinish(self) -> None:
        """Add to the report of runs of other numbers of ranks."""
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        device = torch.cuda.get_device_name() if HAS_GPUS else "CPU"
        models = known.setdefault(device, {})
        for model, layouts in self._outcomes.items():
            models[model] = {**models.get(model, {}), **layouts}
        self._path.write_text(json.dumps(known, indent=1) + "\n")


@pytest.fixture(scope="session")
def world() -> mpi.World:
    """All ranks of this run, on their one host."""
    return mpi.World.discover()
