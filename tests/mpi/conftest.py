"""Run these under MPI: ``make test-mpi-2``, or the command in README.md beside this file."""

from __future__ import annotations

import os

import pytest
import torch

from trimaran.comm import mpi

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a run without MPI, and switch on what pytest-mpi would skip by folder name."""
    if mpi.MPI.COMM_WORLD.Get_size() < 2:
        raise pytest.UsageError("tests/mpi needs 2 or more ranks: make test-mpi-2")
    config.option.with_mpi = True


@pytest.fixture(scope="session")
def world() -> mpi.World:
    """All ranks of this run, on their one host."""
    return mpi.World.discover()


@pytest.fixture(scope="session")
def two_host_world() -> mpi.World:
    """The same ranks, even and odd ones taken to be on hosts that share no memory."""
    rank = mpi.MPI.COMM_WORLD.Get_rank()
    return mpi.World.discover(host=f"host{rank % 2}")
