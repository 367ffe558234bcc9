"""Time of a sum over GPUs and the following norm, from CUDA graphs: two kernels, and one
kernel.

mpirun -n 2 python benchmarks/gpu_sum_norm.py --json benchmarks/results/sum_norm_h200x2.jsonl

Each row of the table is the median of replays of a graph that holds many such pairs for one
number of tokens, divided by their number. ``apart`` is `kernels/triton/peer_sum.py` and
`kernels/triton/norm.py`, ``fused`` is `kernels/cuda/sum_norm.py` with a whole addend or four
float32 parts. Results of ``fused`` are first compared with those of ``apart``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from trimaran.bench.kernels.kernel_timing import microseconds_of_collective
from trimaran.bench.results.results import append, environment
from trimaran.comm import mpi
from trimaran.comm.collectives.connect import connect_group
from trimaran.comm.collectives.torch_groups import NcclGroup, map_peer_memory
from trimaran.kernels.cuda.sum_norm import MAX_ROWS, SumNorm
from trimaran.kernels.cuda.sum_norm import region_bytes as sum_norm_bytes
from trimaran.kernels.triton.norm import rms_norm
from trimaran.kernels.triton.peer_sum import PeerSum, region_bytes
from trimaran.worker.parallel.peer_sums import ONE_SHOT_BYTES
from trimaran.worker.parallel.sum_norms import check_sum_norm

ROWS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]
SLOT_BYTES = 16 << 20
EPS = 1e-5


def times_of(
    group: NcclGroup, sums: PeerSum, fused: SumNorm, shape: tuple[int, int]
) -> dict[str, float]:
    """Microseconds by implementation, for [tokens, width] in bf16."""

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=group.device)

    x, weight, residual = (draw(*each).bfloat16() for each in (shape, shape[1:], shape))
    parts = draw(4, *shape)
    # Repeated sums in place would overflow the type.
    zeros = torch.zeros_like(x)

    def apart() -> None:
        sums(zeros)
        rms_norm(zeros, weight, EPS, residual)

    return {
        "apart": microseconds_of_collective(apart),
        "fused": microseconds_of_collective(lambda: fused(x, residual, weight, EPS)),
        "fused, parts": microseconds_of_collective(lambda: fused(parts, residual, weight, EPS)),
    }


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="append the rows as JSON lines")
    parser.add_argument("--width", type=int, default=4096, metavar="N")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    world = mpi.World.discover()
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    group = connect_group(world, device, 120.0)
    assert isinstance(group, NcclGroup)
    memory = map_peer_memory(group, region_bytes(group.size, SLOT_BYTES))
    one_shot = ONE_SHOT_BYTES[group.size]
    sums = PeerSum(memory.addresses, group.rank, SLOT_BYTES, one_shot, device, memory)
    own = map_peer_memory(group, sum_norm_bytes(group.size, MAX_ROWS))
    fused = SumNorm(own.addresses, group.rank, MAX_ROWS, device, own)
    if problem := check_sum_norm(group, fused, MAX_ROWS):
        raise SystemExit(f"rank {group.rank}: {problem}")
    if world.rank == 0:
        print(f"{world.size} x {torch.cuda.get_device_name(device)}, bf16, {args.width} wide")
    for rows in ROWS:
        own_times = times_of(group, sums, fused, (rows, args.width))
        times = {
            name: round(max(world.comm.allgather(value)), 2)
            for name, value in own_times.items()
        }
        if world.rank == 0:
            print(
                f"{rows:6}  " + "  ".join(f"{k} {v:7.2f}" for k, v in times.items()), flush=True
            )
            if args.json:
                line: dict[str, Any] = {"benchmark": "sum_norm", "ranks": world.size}
                line |= {"rows": rows, "width": args.width, "us": times}
                append(args.json, line | environment(device, None))
    group.close()
    mpi.finalize()


if __name__ == "__main__":
    main()
