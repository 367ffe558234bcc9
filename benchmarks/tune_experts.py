"""Finds the best tile shapes of the two grouped products of a mixture of experts, on one GPU.

    python benchmarks/tune_experts.py --output kernels/tables/nvidia_h200_experts.json
    python benchmarks/tune_experts.py --output ... --experts 128 --chosen 8 --hidden 2048 \
        --inner 768

For each number of tokens, the expert MLPs of some layers run one after another in a CUDA graph,
with random choices of experts. Each product in turn tries every likely tile shape of our Hopper
kernel and of the Triton kernel; the fastest pair is kept. The output shows the share of the
limit that each pair reaches. The limit is the time to read and write once the weights of chosen
experts and all rows, or the time of the multiplications.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_timing import captured, replays_s
from trimaran.kernels.cuda.grouped_gemm import compile_grouped
from trimaran.kernels.experts import MeasuredExperts
from trimaran.kernels.tables.grouped_table import (
    Cut,
    GroupedKind,
    GroupedShape,
    GroupedTable,
    TritonCut,
    expert_limit,
    stack_name,
)

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
NUM_LAYERS = 3
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192]
SUSTAINED_TOKENS = 512
"""Tokens from which the clock falls under load, so that means over some time count."""

_MEMORY_BYTES_S = 4.28e12
_FLOPS = 680e12

Pair = tuple[Cut, Cut]
"""Tile shapes of the gated and of the plain product."""


class Shape(NamedTuple):
    """A mixture's sizes."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    parts: int = 1
    """Factor of ``experts`` for the total, which ranks divide; the first ones are here."""


class Mixtures:
    """The experts of some layers, and the time of one layer's experts."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        experts, _, hidden, inner, _ = shape
        self._weights = [
            (_drawn(experts, 2 * inner, hidden), _drawn(experts, hidden, inner))
            for _ in range(NUM_LAYERS)
        ]
        self.names = (
            stack_name((experts, 2 * inner, hidden), "gated"),
            stack_name((experts, hidden, inner), "plain"),
        )

    def time_us(self, tokens: int, cuts: Pair | None) -> float:
        """Median time of a layer's experts with these tile shapes, or its mean under load;
        without tile shapes, with those of Triton.
        """
        rows = tokens * self.shape.chosen
        entries = {} if cuts is None else {
            name: [(rows, list(astuple(cut)))]
            for name, cut in zip(self.names, cuts, strict=True)
        }  # fmt: skip
        mixture = MeasuredExperts(DEVICE, DTYPE, GroupedTable(entries))
        generator = torch.Generator(DEVICE).manual_seed(tokens)
        x = torch.randn(
            (tokens, self.shape.hidden), device=DEVICE, dtype=DTYPE, generator=generator
        )
        chosen = []
        for _ in self._weights:
            every = self.shape.experts * self.shape.parts
            odds = torch.rand((tokens, every), device=DEVICE, generator=generator)
            weights, ids = odds.topk(self.shape.chosen)
            chosen.append((weights, ids.int()))

        def run() -> None:
            for matrices, choice in zip(self._weights, chosen, strict=True):
                mixture.expert_mlp(x, *choice, *matrices)

        graph = captured(run)
        if tokens < SUSTAINED_TOKENS:
            return 1e6 * statistics.median(replays_s(graph) for _ in range(9)) / NUM_LAYERS
        once_s = replays_s(graph, 2)
        replays_s(graph, int(0.2 / once_s) + 1)
        return 1e6 * replays_s(graph, int(0.3 / once_s) + 1) / NUM_LAYERS

    def limit_us(self, tokens: int) -> float:
        """The least time that memory and multipliers allow."""
        experts, chosen, hidden, inner, parts = self.shape
        read = experts * (1 - (1 - chosen / experts / parts) ** tokens)
        moved = 2.0 * (3 * read * hidden * inner + 2 * tokens * hidden)
        flops = 6.0 * tokens * chosen * hidden * inner / parts
        return max(moved / _MEMORY_BYTES_S, flops / _FLOPS) * 1e6


def likely_cuts(tokens: int, shape: Shape, kind: GroupedKind) -> Iterator[Cut]:
    """Tile shapes worth a measurement: an expert's rows in one run where possible."""
    average = -(-tokens * shape.chosen // (shape.experts * shape.parts))
    if average <= 64:
        rows = next(rows for rows in (16, 32, 64, 96) if average + 8 <= rows or rows == 96)
        for weights in (64, 128, 256):
            yield GroupedShape(weights, rows)
    if 16 < average <= 512:
        for weights, rows in ((128, 128), (256, 128), (128, 256), (256, 192)):
            yield GroupedShape(weights, rows)
    if average > 64:
        for weights, rows in ((256, 128), (256, 160), (256, 192), (128, 256)):
            yield GroupedShape(weights, rows, 2)
    if average > 256:
        yield GroupedShape(256, 192, 4)
    if average <= 16:
        for numbers in (
            (16, 256, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 3), (64, 128, 4, 4),
            (64, 128, 8, 4), (128, 128, 8, 3),
        ):  # fmt: skip
            yield TritonCut(16, *numbers)
    elif average > 32:
        rows = 128 if average > 64 else 64
        for columns, warps, stages in ((128, 8, 3), (128, 8, 4), (128, 4, 3)):
            yield TritonCut(rows, columns, 64, warps, stages)


def tune(mixtures: Mixtures, tokens: int) -> Pair | None:
    """The best pair of tile shapes for a number of tokens; None if Triton's default is."""
    shape = mixtures.shape
    best: Pair | None = None
    best_us = first_us = mixtures.time_us(tokens, None)
    told = []
    for family in (GroupedShape, TritonCut):
        gated, plain = (
            [cut for cut in likely_cuts(tokens, shape, kind) if isinstance(cut, family)]
            for kind in ("gated", "plain")
        )
        if not gated:
            continue
        pair: Pair = (gated[0], plain[0])
        pair_us = mixtures.time_us(tokens, pair)
        for other in [(cut, plain[0]) for cut in gated[1:]]:
            time_us = mixtures.time_us(tokens, other)
            if time_us < pair_us:
                pair, pair_us = other, time_us
        for other in [(pair[0], cut) for cut in plain[1:]]:
            time_us = mixtures.time_us(tokens, other)
            if time_us < pair_us:
                pair, pair_us = other, time_us
        told.append(f"{family.__name__} {pair_us:.1f}")
        if pair_us < 0.997 * best_us:
            best, best_us = pair, pair_us
    limit_us = mixtures.limit_us(tokens)
    cuts = None if best is None else [list(astuple(cut)) for cut in best]
    print(
        f"{tokens:5d} tokens: limit {limit_us:.1f} us, Triton {first_us:.1f}, "
        f"{', '.join(told)}: {100 * limit_us / best_us:.0f} % by {cuts}",
        flush=True,
    )
    return best


def compile_all(shape: Shape, token_counts: list[int]) -> None:
    """Compile all timed kernels in parallel."""
    kinds: tuple[GroupedKind, ...] = ("gated", "plain")
    jobs = {
        (cut, kind)
        for tokens in token_counts
        for kind in kinds
        for cut in likely_cuts(tokens, shape, kind)
        if isinstance(cut, GroupedShape)
    }
    limit = expert_limit(shape.experts)
    # The slowest first.
    ordered = sorted(jobs, key=lambda job: -job[0].rows)
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_grouped(job[0], DTYPE, job[1], limit), ordered))


def _drawn(*shape: int) -> Tensor:
    return 0.02 * torch.randn(shape, device=DEVICE, dtype=DTYPE)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=8, help="of this rank")
    parser.add_argument("--parts", type=int, default=1, help="--moe-ep-size")
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336, help="of this rank's experts")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    shape = Shape(args.experts, args.chosen, args.hidden, args.inner, args.parts)
    start = time.monotonic()
    compile_all(shape, args.tokens)
    print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
    entries = json.loads(args.output.read_text()) if args.output.exists() else {}
    mixtures = Mixtures(shape)
    for tokens in args.tokens:
        pair = tune(mixtures, tokens)
        for place, name in enumerate(mixtures.names):
            cut = None if pair is None else list(astuple(pair[place]))
            rows = tokens * shape.chosen
            steps = [step for step in entries.get(name, []) if step[0] != rows]
            entries[name] = sorted([*steps, [rows, cut]], key=lambda step: step[0])
        lines = [f"{json.dumps(name)}: {json.dumps(steps)}" for name, steps in entries.items()]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
