"""Run these under MPI with a GPU a rank; the command is in README.md beside this file."""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.comm import mpi

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a meaningless run: on one rank, or with too few GPUs."""
    size, count = mpi.MPI.COMM_WORLD.Get_size(), torch.cuda.device_count()
    if size < 2 or count < size:
        raise pytest.UsageError(
            f"needs 2 or more ranks under mpirun, with a GPU each: {size} rank(s) "
            f"see {count} GPU(s)"
        )
    config.option.with_mpi = True


@pytest.fixture(scope="session")
def world() -> mpi.World:
    """All ranks of this run."""
    world = mpi.World.discover()
    torch.cuda.set_device(world.local_rank)
    return world
