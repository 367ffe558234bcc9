"""Measures how our Hopper kernel should cut the products of a layer, and writes the table.

    python benchmarks/tune_products.py --output kernels/tables/nvidia_h200.json

What a cut is worth depends on its neighbours: a kernel begins while the one before it ends,
and finds in the cache what that one left there. So whole layers are timed, products and norms,
over weights that no cache holds, from a CUDA graph. The products of a layer get their likeliest
cuts one after the other, and a cut stays if it makes the layer 0.3 % faster; torch is a
candidate too. From `SUSTAINED_ROWS` on a trial runs until the card has lowered its clock as it
does under load, since what is fastest at a high clock need not be so at a low one. Entries of
the file for other weights and numbers of rows are kept. The logits' product stands behind the
last layer, up to `LOGITS_ROWS`. With ``--tp-size`` the weights are a rank's share, and what
ranks would sum goes to the norm as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimaran.kernels import triton_norm
from trimaran.kernels.hopper_gemm import compile_gemm
from trimaran.kernels.product_table import Choice, GemmShape, Kind, ProductTable
from trimaran.kernels.products import HopperProducts

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROWS = [
    1,
    8,
    16,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    2048,
    4096,
    8192,
]
SUSTAINED_ROWS = 512
LOGITS_ROWS = 1024
NUM_LAYERS = 6
"""Layers of a chain, each with weights of its own."""

# What a step of a block costs at least, by resource: to rank cuts, not to predict them.
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
_FLOPS = 790e12 / 132
_CACHE_BYTES_S = 11e12 / 132
_MEMORY_BYTES_S = 4.3e12
_STEP_S = 0.1e-6


@dataclass(frozen=True)
class Product:
    """A weight's sizes and the kind of product, as the table names them."""

    outputs: int
    inner: int
    kind: Kind

    @property
    def name(self) -> str:
        return f"{self.outputs}x{self.inner} {self.kind}"

    def estimate_s(self, rows: int, cut: GemmShape) -> float:
        """Roughly how long a cut takes."""
        row_tiles = -(-rows // cut.rows)
        groups = row_tiles * -(-self.outputs // (cut.columns * cut.sharing))
        if self.kind == "parts":
            groups *= cut.split
        exact_rounds = groups / _CLUSTERS[cut.cluster(self.kind)]
        rounds: float = math.ceil(exact_rounds)
        if rows >= SUSTAINED_ROWS:
            # Idle processors leave their power to the others.
            rounds = (rounds + exact_rounds) / 2
        steps = -(-self.inner // 64 // cut.split)
        used = max(min(rows, cut.rows), 8)
        copy_s = 128 * (used + cut.columns) / _CACHE_BYTES_S
        step_s = max(2 * 64 * cut.rows * cut.columns / _FLOPS, copy_s, _STEP_S)
        busy_s = rounds * (steps * step_s + 1e-6)
        read_s = 2 * self.outputs * self.inner / _MEMORY_BYTES_S
        sums_s = 1.2e-6 + 4 * used * cut.columns / 60e9 if cut.split > 1 else 0.0
        if self.kind == "parts":
            sums_s = 8 * rows * self.outputs * cut.split / _MEMORY_BYTES_S
        return max(busy_s, read_s) + sums_s + 0.1 * (busy_s + rounds * steps * copy_s)

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


class Layers:
    """The products and norms of some layers, and the time that one of them takes."""

    def __init__(
        self, hidden: int, inner: int, heads_width: int, vocabulary: int, num_ranks: int = 1
    ) -> None:
        self._has_sums = num_ranks > 1
        inner, heads_width = inner // num_ranks, heads_width // num_ranks
        self._of_layer = [
            Product(2 * inner, hidden, "gated"), Product(hidden, inner, "parts"),
            Product(hidden, hidden // num_ranks, "parts"),
            Product(heads_width, hidden, "plain"),
        ]  # fmt: skip
        self._logits = Product(vocabulary // num_ranks, hidden, "plain")
        self._weights = [
            [_drawn(product.outputs, product.inner) for product in self._of_layer]
            for _ in range(NUM_LAYERS)
        ]
        self._head = _drawn(vocabulary, hidden)
        self._scale = torch.ones(hidden, device=DEVICE, dtype=DTYPE)

    def products(self, rows: int) -> list[Product]:
        """Those of a step with so many rows."""
        return [*self._of_layer, self._logits] if rows <= LOGITS_ROWS else self._of_layer

    def time_us(self, rows: int, choices: dict[Product, Choice]) -> float:
        """Median time of a layer with these cuts, or its mean under load."""
        table = {product.name: [(rows, _as_list(cut))] for product, cut in choices.items()}
        products = HopperProducts(DEVICE, DTYPE, table=ProductTable(table))
        x, residual = (50 * _drawn(rows, self._logits.inner) for _ in range(2))
        graph = _captured(lambda: self._run(products, x, residual))
        if rows < SUSTAINED_ROWS:
            return statistics.median(_replays_us(graph, 1) for _ in range(7)) / NUM_LAYERS
        once_us = _replays_us(graph, 2)
        _replays_us(graph, int(0.4e6 / once_us) + 1)
        return _replays_us(graph, int(0.6e6 / once_us) + 1) / NUM_LAYERS

    def _run(self, products: HopperProducts, x: Tensor, residual: Tensor) -> None:
        scale = self._scale
        change: Tensor | None = None
        for gate_up, down, out, qkv in self._weights:
            heads = products.linear(self._norm(x, residual, change), qkv)
            # In the place of attention: it reads heads and leaves as much as queries are.
            attended = triton_norm.rms_norm(heads[:, : out.shape[1]], scale, 1e-5)
            change = self._added(products, attended, out, residual)
            gated = products.gated_linear(self._norm(residual, residual, change), gate_up)
            change = self._added(products, gated, down, residual)
            x = residual
        if len(x) <= LOGITS_ROWS:
            products.linear(self._norm(x, residual, change), self._head)

    def _added(
        self, products: HopperProducts, x: Tensor, weight: Tensor, residual: Tensor
    ) -> Tensor | None:
        if self._has_sums:
            return products.linear_parts(x, weight)
        return products.add_linear(x, weight, residual)

    def _norm(self, x: Tensor, residual: Tensor, change: Tensor | None) -> Tensor:
        if change is None:
            return triton_norm.rms_norm(x, self._scale, 1e-5)
        return triton_norm.rms_norm(change, self._scale, 1e-5, residual)


def _drawn(rows: int, columns: int) -> Tensor:
    return 0.02 * torch.randn((rows, columns), device=DEVICE, dtype=DTYPE)


def _as_list(cut: Choice) -> list[int] | None:
    if cut is None:
        return None
    stages = [cut.most_stages] if cut.most_stages < 16 else []
    return [cut.rows, cut.columns, cut.split, cut.sharing, *stages]


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
    graph.replay()
    return graph


def _replays_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Mean time of some replays, one behind the other."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def tune(
    layers: Layers, rows: int, table: ProductTable, num_cuts: int
) -> dict[Product, Choice]:
    """The best cut of each product for a number of rows, beginning with the table's."""
    best = {
        product: table.pick(rows, product.outputs, product.inner, product.kind)
        for product in layers.products(rows)
    }
    best_us = first_us = layers.time_us(rows, best)
    torch_us = layers.time_us(rows, dict.fromkeys(best))
    for product in layers.products(rows):
        for cut in [None, *product.likely_cuts(rows, num_cuts)]:
            time_us = layers.time_us(rows, {**best, product: cut})
            if time_us < 0.997 * best_us:
                best_us, best[product] = time_us, cut
    cuts = ", ".join(f"{product.name} {_as_list(cut)}" for product, cut in best.items())
    print(
        f"{rows:5d} rows: torch {torch_us:.1f} us a layer, before {first_us:.1f}, "
        f"now {best_us:.1f}: {cuts}",
        flush=True,
    )
    return best


def compile_all(layers: Layers, row_counts: list[int], num_cuts: int) -> None:
    """Compile side by side whatever will be timed."""
    jobs = {
        (cut, product.kind)
        for rows in row_counts
        for product in layers.products(rows)
        for cut in product.likely_cuts(rows, num_cuts)
    }
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_gemm(job[0], DTYPE, job[1]), jobs))


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336, help="of the MLP")
    parser.add_argument(
        "--heads-width", type=int, default=6144, help="queries, keys and values"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--cuts", type=int, default=8, help="cuts to time for each product")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share the weights")
    args = parser.parse_args()
    entries = json.loads(args.output.read_text()) if args.output.exists() else {}
    layers = Layers(
        args.hidden, args.inner, args.heads_width, args.vocabulary, args.tp_size
    )  # fmt: skip
    start = time.monotonic()
    compile_all(layers, args.rows, args.cuts)
    print(f"compiled in {time.monotonic() - start:.1f} s")
    for rows in args.rows:
        for product, cut in tune(layers, rows, ProductTable(entries), args.cuts).items():
            steps = dict(entries.get(product.name, ()))
            steps[rows] = _as_list(cut)
            entries[product.name] = [[most, steps[most]] for most in sorted(steps)]
        # Where torch is always best nothing needs to be said.
        kept = {key: steps for key, steps in entries.items() if any(cut for _, cut in steps)}
        lines = [f'"{key}": {json.dumps(steps)}' for key, steps in sorted(kept.items())]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
