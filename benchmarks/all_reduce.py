"""Time of one all-reduce among CPU ranks: shared memory, MPI and gloo, side by side.

mpirun -n 2 python benchmarks/all_reduce.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch

from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.torch_groups import GlooGroup

SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20)
WARM_UP = 20


def timed(call: Callable[[], object], num_calls: int) -> tuple[float, float]:
    """Median and 99th percentile of one call, in microseconds."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    times.sort()
    return times[num_calls // 2] * 1e6, times[int(num_calls * 0.99)] * 1e6


def measure(world: mpi.World) -> list[tuple[str, int, float, float]]:
    """Rows of transport, bytes, median, 99th percentile. Collective."""
    shared = connect_group(world, torch.device("cpu"), 30.0)
    gloo = GlooGroup(world, 30.0, 30.0)
    rows = []
    for num_bytes in SIZES:
        num_calls = 3000 if num_bytes <= 16 << 10 else 300
        full = torch.zeros(num_bytes // 4)
        half = torch.zeros(num_bytes // 2, dtype=torch.bfloat16)
        source, target = (
            np.zeros(num_bytes // 4, np.float32),
            np.zeros(num_bytes // 4, np.float32),
        )
        calls: dict[str, Callable[[], object]] = {
            "shared memory, float32": lambda full=full: shared.all_reduce(full),
            "shared memory, bfloat16": lambda half=half: shared.all_reduce(half),
            "MPI, float32": lambda a=source, b=target: world.comm.Allreduce(a, b),
        }
        for name, call in calls.items():
            rows.append((name, num_bytes, *timed(call, num_calls)))
        rows.append(
            ("gloo, float32", num_bytes, *timed(lambda t=full: gloo.all_reduce(t), 100))
        )
    gloo.close()
    return rows


def main() -> None:
    """Print one table on rank 0."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    world = mpi.World.discover()
    rows = measure(world)
    if world.rank == 0:
        load, library = os.getloadavg()[0], mpi.library_version()
        print(f"{world.size} ranks, {os.cpu_count()} cores, load {load:.1f}, {library}")
        for name, num_bytes, median, worst in rows:
            size = f"{num_bytes >> 10:>6} KiB"
            print(f"{name:<24} {size}  p50 {median:8.1f} us  p99 {worst:8.1f} us")
    mpi.finalize()


if __name__ == "__main__":
    main()
