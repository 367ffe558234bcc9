"""Measures how our Hopper kernel should cut each product, and writes the table that serves.

    python benchmarks/tune_products.py --output kernels/tables/nvidia_h200.json

For each weight and number of rows the likeliest cuts are timed beside torch's product, each
behind a normalisation as in a model (parts: before the one that adds them up), in a CUDA graph
over weights that no cache holds. A cut is taken where it is 1 % faster than torch. Entries of
the file for other weights are kept.
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
from trimaran.kernels.product_table import GemmShape, Kind
from trimaran.kernels.reference import add_linear
from trimaran.kernels.split_product import num_parts, split_product

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
LLAMA_8B = [
    "6144x4096 plain", "4096x4096 parts", "28672x4096 gated", "4096x14336 parts",
    "128256x4096 plain",
]  # fmt: skip
ROWS = [1, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024]
PROMPT_ROWS = [2048, 4096, 8192]
"""For gated products too: there our kernel saves a pass over the memory."""


# What a step of a block costs at least, by resource: to rank cuts, not to predict them.
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
_FLOPS = 790e12 / 132
_CACHE_BYTES_S = 8.5e12 / 132
_MEMORY_BYTES_S = 4.3e12
_STEP_S = 0.1e-6


@dataclass(frozen=True)
class Weight:
    """A weight's sizes and the kind of product, as the table names them."""

    outputs: int
    inner: int
    kind: Kind

    @classmethod
    def parse(cls, name: str) -> Weight:
        """From ``outputs x inner kind``."""
        sizes, _, kind = name.partition(" ")
        outputs, _, inner = sizes.partition("x")
        return cls(int(outputs), int(inner), kind)  # type: ignore[arg-type]

    def estimate_s(self, rows: int, cut: GemmShape) -> float:
        """Roughly how long a cut takes."""
        row_tiles = -(-rows // cut.rows)
        groups = row_tiles * -(-self.outputs // (cut.columns * cut.sharing))
        if self.kind == "parts":
            groups *= cut.split
        rounds = -(-groups // _CLUSTERS[cut.cluster(self.kind)])
        steps = -(-self.inner // 64 // cut.split)
        used = max(min(rows, cut.rows), 8)
        step_s = max(
            2 * 64 * cut.rows * cut.columns / _FLOPS,
            128 * (used / cut.sharing + cut.columns) / _CACHE_BYTES_S,
            _STEP_S,
        )
        sums_s = 1.2e-6 + 4 * used * cut.columns / 60e9 if cut.split > 1 else 0.0
        if self.kind == "parts":
            sums_s = 8 * rows * self.outputs * cut.split / _MEMORY_BYTES_S
        busy_s = rounds * (steps * step_s + 1e-6) + sums_s
        return max(busy_s, 2 * self.outputs * self.inner / _MEMORY_BYTES_S) + 0.1 * busy_s

    def likely_cuts(self, rows: int, count: int) -> list[GemmShape]:
        """The cuts with the least estimates, at most two of equal tiles."""
        found: list[GemmShape] = []
        for cut in sorted(self._cuts(rows), key=lambda cut: self.estimate_s(rows, cut)):
            tile = (cut.rows, cut.columns)
            if sum((other.rows, other.columns) == tile for other in found) < 2:
                found.append(cut)
            if len(found) == count:
                break
        return found

    def _cuts(self, rows: int) -> Iterator[GemmShape]:
        tiles = [tile for tile in (64, 128, 192, 256) if tile - 64 < rows]
        for tile in tiles[-2:] if rows <= 128 else tiles[1:]:
            for columns in range(64, 257 if tile <= 128 else 193, 16):
                yield from self._fitting(tile, columns)

    def _fitting(self, tile: int, columns: int) -> Iterator[GemmShape]:
        for split in range(1, 9):
            for sharing in (1, 2, 4):
                cut = GemmShape(tile, columns, split, sharing)
                if cut.cluster(self.kind) > 8 or cut.stages < 3:
                    continue
                try:
                    cut.check(self.kind)
                except ValueError:
                    continue
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
        self._scale = torch.ones(max(weight.inner, weight.outputs), device=DEVICE, dtype=DTYPE)

    def time_us(self, rows: int, product: Callable[..., Tensor | None]) -> float:
        """Time of a product and the normalisation before it, or behind its parts."""
        count, weight = len(self._weights), self.weight
        inputs = torch.randn((count, rows, weight.inner), device=DEVICE, dtype=DTYPE)
        residual = torch.zeros((rows, weight.outputs), device=DEVICE, dtype=DTYPE)
        scale = self._scale[: weight.outputs if weight.kind == "parts" else weight.inner]

        def call(number: int) -> object:
            x, w = inputs[number % count], self._weights[number % count]
            if weight.kind != "parts":
                return product(triton_norm.rms_norm(x, scale, 1e-5), w)
            parts = product(x, w, residual)
            if parts is None:
                return triton_norm.rms_norm(residual, scale, 1e-5)
            return triton_norm.rms_norm(parts, scale, 1e-5, residual)

        return time_us(call, 16 if rows * weight.outputs * weight.inner < 2e10 else 6)

    def choose(self, rows: int, num_cuts: int) -> GemmShape | None:
        """The fastest cut, or None for torch; prints the times."""
        kind = self.weight.kind
        torch_us = self.time_us(rows, _TORCH[kind])
        times = []
        for cut in self.weight.likely_cuts(rows, num_cuts):
            kernel = HopperGemm(cut, DTYPE, DEVICE, kind)
            times.append((self.time_us(rows, lambda x, w, *_: kernel(x, w)), cut))  # noqa: B023
        times.sort(key=lambda time: time[0])
        ours = ", ".join(
            f"{us:.1f} {cut.rows}x{cut.columns}/{cut.split}/{cut.sharing}"
            for us, cut in times[:4]
        )
        sizes = f"{self.weight.outputs}x{self.weight.inner} {kind}"
        print(f"{sizes:18} {rows:5d} rows: torch {torch_us:7.1f} us, ours {ours}", flush=True)
        return times[0][1] if times[0][0] < 0.99 * torch_us else None


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    return triton_elementwise.silu_and_mul(F.linear(x, weight))


def _parts(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
    parts = num_parts(x.shape[0], *weight.shape)
    return split_product(x, weight, parts) if parts > 1 else add_linear(x, weight, residual)


_TORCH: dict[Kind, Callable[..., Tensor | None]] = {
    "plain": F.linear,
    "gated": _gated,
    "parts": _parts,
}


def compile_all(weights: list[Weight], row_counts: list[int], num_cuts: int) -> None:
    """Compile side by side whatever will be timed."""
    jobs = {
        (cut, weight.kind)
        for weight in weights
        for rows in row_counts
        for cut in weight.likely_cuts(rows, num_cuts)
    }
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_gemm(job[0], DTYPE, job[1]), jobs))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--products", nargs="+", default=LLAMA_8B, metavar="OUTPUTSxINNER")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--prompt-rows", nargs="*", type=int, default=PROMPT_ROWS)
    parser.add_argument("--cuts", type=int, default=10, help="cuts to time for each product")
    args = parser.parse_args()
    table = json.loads(args.output.read_text()) if args.output.exists() else {}
    weights = [Weight.parse(name) for name in args.products]
    start = time.monotonic()
    compile_all(weights, [*args.rows, *args.prompt_rows], args.cuts)
    print(f"compiled in {time.monotonic() - start:.1f} s")
    for name, weight in zip(args.products, weights, strict=True):
        bench = Bench(weight)
        counts = sorted({*args.rows, *(args.prompt_rows if weight.kind == "gated" else ())})
        choices = [(rows, bench.choose(rows, args.cuts)) for rows in counts]
        table[name] = [
            (rows, cut and [cut.rows, cut.columns, cut.split, cut.sharing])
            for rows, cut in choices
        ]
        lines = [f'"{key}": {json.dumps(steps)}' for key, steps in sorted(table.items())]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
