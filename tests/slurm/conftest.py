"""One cluster, engines and repositories for all tests of batch jobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
E2E = HERE.parent / "e2e"
sys.path[:0] = [str(HERE), str(E2E)]

_spec = importlib.util.spec_from_file_location("e2e_conftest", E2E / "conftest.py")
assert _spec is not None and _spec.loader is not None
_e2e = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_e2e)
build_engine, make_repository, demo_engine = (
    _e2e.build_engine,
    _e2e.make_repository,
    _e2e.demo_engine,
)

from batch_job import BatchJob  # noqa: E402
from lab import SlurmLab  # noqa: E402


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A cluster of three nodes."""
    with SlurmLab(tmp_path_factory.mktemp("slurm"), num_nodes=3) as cluster:
        yield cluster


@pytest.fixture
def submit(lab: SlurmLab, tmp_path: Path) -> Iterator[Callable[..., BatchJob]]:
    """Submit a template; the end of the test cancels the job with all its processes."""
    jobs: list[BatchJob] = []

    def start(template: str, repository: Path, *flags: str, wait: bool = True) -> BatchJob:
        jobs.append(BatchJob(lab, tmp_path / f"logs{len(jobs)}"))
        jobs[-1].submit(template, repository, *flags, wait=wait)
        return jobs[-1]

    yield start
    for job in jobs:
        if job.job_id:
            job.cancel()
            job.show()
