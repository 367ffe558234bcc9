"""Time of one all-reduce among GPUs of a host, from CUDA graphs: NCCL, our kernels, torch's.

mpirun -n 2 python benchmarks/gpu_all_reduce.py --json benchmarks/results/all_reduce_h200.jsonl

Each row is the median of replays of a graph that holds many sums of one size, divided by their
number; the sums run one after another, as in a decode step. ``peer one-shot`` and ``peer
two-shot`` are `kernels/triton/peer_sum.py`, ``torch`` are the operators of
torch.distributed._symmetric_memory with their copies, in a second table. Results of our kernels
are first compared with those of NCCL.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from trimaran.bench.kernels.kernel_timing import microseconds_of_collective
from trimaran.bench.results.results import append, environment
from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.torch_groups import NcclGroup, map_peer_memory
from trimaran.kernels.triton.peer_sum import PeerSum, region_bytes
from trimaran.worker.parallel.peer_sums import check_sums

SIZES = [1 << shift for shift in range(12, 27)]
MAX_BYTES = SIZES[-1]
Sum = Callable[[torch.Tensor], object]


def ways_of(group: NcclGroup) -> dict[str, tuple[int, Sum]]:
    """By name: the largest size in bytes, and the function that sums a tensor in place."""
    memory = map_peer_memory(group, region_bytes(group.size, MAX_BYTES))
    ways: dict[str, tuple[int, Sum]] = {"nccl": (MAX_BYTES, group.all_reduce)}
    # One set of counters a region, so two algorithms need two regions.
    again = map_peer_memory(group, region_bytes(group.size, MAX_BYTES))
    for name, own, one_shot in (("one-shot", memory, MAX_BYTES), ("two-shot", again, 0)):
        sums = PeerSum(own.addresses, group.rank, MAX_BYTES, one_shot, group.device, own)
        problem = check_sums(group, sums)
        if problem:
            raise SystemExit(f"rank {group.rank}: {problem}")
        ways[f"peer {name}"] = (MAX_BYTES, sums)
    return ways


def torch_ways(group: NcclGroup) -> dict[str, tuple[int, Sum]]:
    """Torch's own kernels, with the copies that they need."""
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory
    name = group.handle.group_name
    buffer = symmetric.empty(MAX_BYTES // 2, dtype=torch.bfloat16, device=group.device)
    symmetric.rendezvous(buffer, name)
    ops = torch.ops.symm_mem

    def one_shot(x: torch.Tensor) -> None:
        part = buffer[: x.numel()]
        ops.one_shot_all_reduce_copy_out(part, x, "sum", name, x)

    def two_shot(x: torch.Tensor) -> None:
        part = buffer[: x.numel()]
        part.copy_(x)
        ops.two_shot_all_reduce_(part, "sum", name)
        x.copy_(part)

    return {"torch one-shot": (8 << 20, one_shot), "torch two-shot": (MAX_BYTES, two_shot)}


def _microseconds(call: Sum, x: torch.Tensor) -> float:
    return microseconds_of_collective(lambda: call(x), lambda: x.normal_().mul_(1e-6))


def _print_table(
    world: mpi.World, device: torch.device, ways: dict[str, tuple[int, Sum]], path: str | None
) -> None:
    """A row for each size, and a JSON line each at ``path``; by rank 0."""
    if world.rank == 0:
        print(f"{'KiB':>8}  " + "  ".join(f"{name:>14}" for name in ways))
    for num_bytes in SIZES:
        x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        found = {}
        for name, (most, call) in ways.items():
            if num_bytes <= most:
                found[name] = round(max(world.comm.allgather(_microseconds(call, x))), 2)
        if world.rank == 0:
            cells = (f"{found.get(name, float('nan')):14.2f}" for name in ways)
            print(f"{num_bytes >> 10:8}  " + "  ".join(cells), flush=True)
            if path:
                line = {"benchmark": "all_reduce", "ranks": world.size, "bytes": num_bytes}
                append(path, {**line, "us": found, **environment(device, None)})


def main() -> None:
    """Print the tables on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="append the rows as JSON lines")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    world = mpi.World.discover()
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    group = connect_group(world, device, 120.0)
    assert isinstance(group, NcclGroup)
    if world.rank == 0:
        print(f"{world.size} x {torch.cuda.get_device_name(device)}, bf16, microseconds")
    for make_ways in (ways_of, torch_ways):
        _print_table(world, device, make_ways(group), args.json)
    group.close()
    mpi.finalize()


if __name__ == "__main__":
    main()
