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
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from functools import partial
from pathlib import Path

import torch

from trimaran.kernels.cuda.grouped_gemm import compile_grouped
from trimaran.kernels.tables.grouped_table import GroupedKind, GroupedShape, expert_limit
from trimaran.kernels.tuning.expert_candidates import MixtureSizes, likely_cuts
from trimaran.kernels.tuning.expert_timing import ExpertTimer, Pair
from trimaran.kernels.tuning.search import best_pair

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192]


def tune(timer: ExpertTimer, tokens: int) -> Pair | None:
    """The best pair of tile shapes for a number of tokens; None if the derived rule is."""
    sizes = timer.sizes
    cuts = list(likely_cuts(tokens, sizes))
    best, first_us, best_us = best_pair(partial(timer.time_us, tokens), cuts)
    limit_us = sizes.limit_us(tokens)
    shown = None if best is None else [list(astuple(cut)) for cut in best]
    print(
        f"{tokens:5d} tokens: limit {limit_us:.1f} us, by rule {first_us:.1f}, best "
        f"{best_us:.1f}: {100 * limit_us / best_us:.0f} % by {shown}",
        flush=True,
    )
    return best


def compile_all(shape: MixtureSizes, token_counts: list[int]) -> None:
    """Compile all timed kernels in parallel."""
    kinds: tuple[GroupedKind, ...] = ("gated", "plain")
    jobs = {
        (cut, kind)
        for tokens in token_counts
        for kind in kinds
        for cut in likely_cuts(tokens, shape)
        if isinstance(cut, GroupedShape)
    }
    limit = expert_limit(shape.experts)
    # The slowest first.
    ordered = sorted(jobs, key=lambda job: -job[0].rows)
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_grouped(job[0], DTYPE, job[1], limit), ordered))


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
    shape = MixtureSizes(args.experts, args.chosen, args.hidden, args.inner, args.parts)
    start = time.monotonic()
    compile_all(shape, args.tokens)
    print(f"compiled in {time.monotonic() - start:.1f} s", flush=True)
    entries = json.loads(args.output.read_text()) if args.output.exists() else {}
    timer = ExpertTimer(shape, DEVICE, DTYPE)
    for tokens in args.tokens:
        pair = tune(timer, tokens)
        for place, name in enumerate(shape.names):
            cut = None if pair is None else list(astuple(pair[place]))
            rows = tokens * shape.chosen
            steps = [step for step in entries.get(name, []) if step[0] != rows]
            entries[name] = sorted([*steps, [rows, cut]], key=lambda step: step[0])
        lines = [f"{json.dumps(name)}: {json.dumps(steps)}" for name, steps in entries.items()]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
