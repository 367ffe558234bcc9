"""Run these under MPI: ``make test-mpi-2``, or the command in README.md beside this file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Set before the first import of triton, so that kernels for GPUs run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.unit.worker.models import models
from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.tensor_group import TensorParallelGroup

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

NUM_RANKS = mpi.MPI.COMM_WORLD.Get_size()
JOBS = (2, 4)
"""The sizes of the jobs that `make test` runs."""
FAMILY_RANKS = 4
collect_ignore = ["test_families.py"]
if NUM_RANKS == FAMILY_RANKS:
    # All families take their time: one job of the tests runs them.
    collect_ignore.clear()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run without MPI, and switch on what pytest-mpi would skip by folder name."""
    if NUM_RANKS < 2:
        raise pytest.UsageError("tests/mpi needs 2 or more ranks: make test-mpi-2")
    config.option.with_mpi = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Every test here runs on all ranks of a job: pytest-mpi's mark. A test marked `ranks` is
    left to the job of that size. With ``--all-cases`` other jobs run the test too, unless the
    mark says ``only``: the test's layout has that many ranks.
    """
    for item in items:
        item.add_marker(pytest.mark.mpi)
    if NUM_RANKS not in JOBS:
        return
    runs_all = config.getoption("--all-cases")
    elsewhere = {item for item in items if not _belongs_here(item, runs_all=runs_all)}
    if elsewhere:
        config.hook.pytest_deselected(items=[item for item in items if item in elsewhere])
        items[:] = [item for item in items if item not in elsewhere]


def _belongs_here(item: pytest.Item, *, runs_all: bool) -> bool:
    """Whether the job of this size runs a test."""
    mark = item.get_closest_marker("ranks")
    if mark is None or mark.args[0] == NUM_RANKS:
        return True
    return runs_all and not mark.kwargs.get("only", False)


@pytest.fixture(scope="session")
def world() -> mpi.World:
    """All ranks of this run, on their one host."""
    return mpi.World.discover()


@pytest.fixture(scope="session")
def two_host_world() -> mpi.World:
    """The same ranks; even and odd ranks count as ranks of hosts that share no memory."""
    rank = mpi.MPI.COMM_WORLD.Get_rank()
    return mpi.World.discover(host=f"host{rank % 2}")


@pytest.fixture(scope="module")
def tensor_group(world: mpi.World) -> Iterator[TensorParallelGroup]:
    """All ranks as one tensor group, over shared memory."""
    group = connect_group(world, torch.device("cpu"), timeout_s=60.0)
    yield group
    world.barrier(60.0, "end of a module")
    group.close()


@pytest.fixture
def checkpoint(world: mpi.World) -> Iterator[Callable[..., Any]]:
    """Makes a checkpoint of a configuration on rank 0. Returns its folder, and a function
    that gives every rank an answer of transformers' model on rank 0."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.comm.bcast(own))

        def make(config: Any, dtype: torch.dtype = torch.float32) -> tuple[Path, Any]:
            is_first = world.rank == 0
            theirs = models.save_huggingface(folder, config, dtype=dtype) if is_first else None
            world.barrier(60.0, "saved")

            def on_rank_0(ask: Callable[[Any], Any]) -> Any:
                answer, failure = None, None
                if is_first:
                    try:
                        answer = ask(theirs)
                    except Exception as error:
                        # Other ranks would wait for the answer until the test's timeout.
                        failure = error
                told = repr(failure) if failure else ""
                answer, told = world.comm.bcast((answer, told))
                if failure is not None:
                    raise failure
                assert not told, f"rank 0 has no answer: {told}"
                return answer

            return folder, on_rank_0

        yield make
        world.barrier(60.0, "read by all")
