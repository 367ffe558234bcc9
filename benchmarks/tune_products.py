"""Measures how our Hopper kernel should cut each product, and writes the table that serves.

    python benchmarks/tune_products.py --output kernels/tables/nvidia_h200.json

For each weight and number of rows the likeliest cuts are timed beside torch's product, each
behind a normalisation as in a model, in a CUDA graph over weights that no cache holds. A cut
is taken where it is 2 % faster than torch. Entries of the file for other weights are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.kernels import triton_elementwise, triton_norm
from trimaran.kernels.hopper_gemm import HopperGemm, compile_gemm
from trimaran.kernels.product_table import GemmShape

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LLAMA_8B = ["6144x4096", "4096x4096", "28672x4096 gated", "4096x14336", "128256x4096"]
ROWS = [1, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024]

# What a step of a block costs at least, by resource: to rank cuts, not to predict them.
_BLOCKS = 132
_FLOPS = 790e12 / _BLOCKS
_CACHE_BYTES_S = 5.5e12 / _BLOCKS
_MEMORY_BYTES_S = 4.3e12
_STEP_S = 0.13e-6


@dataclass(frozen=True)
class Weight:
    """A weight's sizes as the table names them."""

    outputs: int
    inner: int
    is_gated: bool

    @classmethod
    def parse(cls, name: str) -> Weight:
        sizes, _, kind = name.partition(" ")
        outputs, _, inner = sizes.partition("x")
        return cls(int(outputs), int(inner), kind == "gated")

    def estimate_s(self, rows: int, cut: GemmShape) -> float:
        """Roughly how long a cut takes."""
        row_tiles, cluster = -(-rows // cut.rows), cut.split * cut.sharing
        groups = row_tiles * -(-self.outputs // (cut.columns * cut.sharing))
        rounds = -(-groups // (_BLOCKS // cluster - (cluster > 2)))
        steps = -(-self.inner // 64 // cut.split)
        used = max(min(rows, cut.rows), 24)
        step_s = max(
            2 * 64 * cut.rows * cut.columns / _FLOPS,
            128 * (used / cut.sharing + cut.columns) / _CACHE_BYTES_S,
            _STEP_S,
        )
        sums_s = 1e-6 + 4 * used * cut.columns / 80e9 if cut.split > 1 else 0.0
        busy_s = rounds * (steps * step_s + 1e-6) + sums_s
        return max(busy_s, 2 * self.outputs * self.inner / _MEMORY_BYTES_S) + 0.1 * busy_s

    def likely_cuts(self, rows: int, count: int) -> list[GemmShape]:
        """The cuts with the least estimates."""
        cuts = sorted(_cuts(rows), key=lambda cut: self.estimate_s(rows, cut))
        return cuts[:count]


def _cuts(rows: int) -> Iterator[GemmShape]:
    fitting = [tile for tile in (64, 128, 192, 256) if tile - 64 < rows or tile == 64]
    for tile in fitting[-2:] if rows <= 256 else (192, 256):
        for columns in range(80, 257 if tile <= 128 else 193, 16):
            for split in range(1, 9):
                for sharing in (1, 2, 4):
                    if split * sharing > 8:
                        continue
                    try:
                        cut = GemmShape(tile, columns, split, sharing)
                    except ValueError:
                        continue
                    if cut.stages >= 3:
                        yield cut


def time_us(call: Callable[[int], object], num_calls: int) -> float:
    """Median time of a call within a graph of many."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.stream(stream):
        call(0)
        call(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for number in range(num_calls):
                call(number)
        graph.replay()
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / num_calls)
    return statistics.median(times)


class Bench:
    """One weight in several copies, and rows to multiply with it."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        size = 2 * weight.outputs * weight.inner
        count = max(2, min(8, 1 + 400_000_000 // size))
        self._weights = [
            0.02 * torch.randn((weight.outputs, weight.inner), device=DEVICE, dtype=DTYPE)
            for _ in range(count)
        ]
        self._scale = torch.ones(weight.inner, device=DEVICE, dtype=DTYPE)

    def time_us(self, rows: int, product: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Time of a normalisation and a product."""
        count, weight = len(self._weights), self.weight
        inputs = torch.randn((count, rows, weight.inner), device=DEVICE, dtype=DTYPE)

        def call(number: int) -> Tensor:
            normed = triton_norm.rms_norm(inputs[number % count], self._scale, 1e-5)
            return product(normed, self._weights[number % count])

        return time_us(call, 16 if rows * weight.outputs * weight.inner < 2e10 else 6)

    def choose(self, rows: int, num_cuts: int) -> GemmShape | None:
        """The fastest cut, or None for torch; prints both times."""
        torch_us = self.time_us(rows, _gated if self.weight.is_gated else F.linear)
        best_us, best = torch_us, None
        for cut in self.weight.likely_cuts(rows, num_cuts):
            kernel = HopperGemm(cut, DTYPE, DEVICE, is_gated=self.weight.is_gated)
            us = self.time_us(rows, kernel)
            if us < min(best_us, 0.98 * torch_us):
                best_us, best = us, cut
        print(
            f"{self.weight} {rows:5d} torch {torch_us:7.1f} us, ours {best_us:7.1f} us {best}"
        )
        return best


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    return triton_elementwise.silu_and_mul(F.linear(x, weight))


def compile_all(weights: list[Weight], row_counts: list[int], num_cuts: int) -> None:
    """Compile side by side whatever will be timed."""
    jobs = {
        (cut, weight.is_gated)
        for weight in weights
        for rows in row_counts
        for cut in weight.likely_cuts(rows, num_cuts)
    }
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_gemm(job[0], DTYPE, is_gated=job[1]), jobs))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--products", nargs="+", default=LLAMA_8B, metavar="OUTPUTSxINNER")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--cuts", type=int, default=10, help="cuts to time for each product")
    args = parser.parse_args()
    table = json.loads(args.output.read_text()) if args.output.exists() else {}
    weights = [Weight.parse(name) for name in args.products]
    start = time.monotonic()
    compile_all(weights, args.rows, args.cuts)
    print(f"compiled in {time.monotonic() - start:.1f} s")
    for name, weight in zip(args.products, weights, strict=True):
        bench = Bench(weight)
        choices = [(rows, bench.choose(rows, args.cuts)) for rows in sorted(args.rows)]
        table[name] = [
            (rows, cut and [cut.rows, cut.columns, cut.split, cut.sharing])
            for rows, cut in choices
        ]
        lines = [f'"{key}": {json.dumps(steps)}' for key, steps in sorted(table.items())]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
