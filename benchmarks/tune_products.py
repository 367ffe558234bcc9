"""Measures the best tile shapes of our Hopper kernel for a layer's products, and writes the
table.

    python benchmarks/tune_products.py --output kernels/tables/nvidia_h200.json

The speed of a tile shape depends on neighbouring kernels: a kernel begins before the preceding
kernel has ended, and uses data that the preceding kernel left in the cache. The program
therefore times whole layers from a CUDA graph: products, norms and with ``--context`` the
attention of decodes, over weights that exceed every cache. The products of a layer try their
likeliest tile shapes one after another. A tile shape is kept if it makes the layer 0.3 % faster
in two comparisons with the best so far; torch is a candidate too. From ``--sustained-rows`` on
a trial runs for ``--trial-seconds``, until the GPU has lowered its clock under load, because
the fastest tile shape at a high clock may be slower at a low clock. Entries of the file for
other weights and numbers of rows are kept. The logits' product follows the last layer, up to
`LOGITS_ROWS`, and counts with a layer's share. ``--kinds`` tunes the given kinds of products
and keeps the table's entries of other kinds. With ``--tp-size`` the weights are a rank's share,
and the norm reads the rank's product without a sum over ranks. ``--also`` adds candidates by
product, in the form of the table; ``--compile-only`` compiles all candidates and needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.cuda.skinny_gemm import compile_choice
from trimaran.kernels.decode_attention import HopperDecodes
from trimaran.kernels.products import HopperProducts
from trimaran.kernels.tables.product_table import (
    Choice,
    GemmShape,
    Kind,
    ProductTable,
    SkinnyShape,
)
from trimaran.kernels.triton import norm as triton_norm
from trimaran.kernels.tuning.graph_timing import captured, replays_s
from trimaran.kernels.tuning.product_candidates import (
    COPIED_BYTES_S,
    SUSTAINED_ROWS,
    Product,
)
from trimaran.kernels.tuning.product_timing import numbers_of

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
LOGITS_ROWS = 1024
NUM_LAYERS = 6
"""Layers of a chain, each with its own weights."""

HEAD_SIZE, BLOCK_TOKENS = 128, 32

_WARM_S = 5.0
"""In the first seconds of load a layer of 500 rows takes 3 % less than later."""

_EARLY_TILES = (1, 2, 3, 5, 8)
"""Values tried with the best tile shape: bytes of weights in flight before the rows are
ready.
"""


class Sizes:
    """The products of a rank's layers."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._kinds: list[str] = args.kinds
        ranks, hidden = args.tp_size, args.hidden
        inner, heads_width = args.inner // ranks, args.heads_width // ranks
        self.has_sums = ranks > 1
        self.context: int = args.context
        self.num_kv_heads = (heads_width - hidden // ranks) // (2 * HEAD_SIZE)
        self.num_heads = hidden // ranks // HEAD_SIZE
        self.of_layer = [
            Product(2 * inner, hidden, "gated"), Product(hidden, inner, "parts"),
            Product(hidden, hidden // ranks, "parts"),
            Product(heads_width, hidden, "plain"),
        ]  # fmt: skip
        self.logits = Product(args.vocabulary // ranks, hidden, "plain")

    def products(self, rows: int) -> list[Product]:
        """The products of a step with this many rows."""
        return [*self.of_layer, self.logits] if rows <= LOGITS_ROWS else self.of_layer

    def tuned(self, rows: int) -> list[Product]:
        """The requested subset of these products."""
        return [product for product in self.products(rows) if product.kind in self._kinds]

    def limit_us(self, rows: int) -> float:
        """The time of a layer, with its share of the logits."""
        limit_s = sum(product.limit_s(rows) for product in self.of_layer)
        if rows <= LOGITS_ROWS:
            limit_s += self.logits.limit_s(rows) / NUM_LAYERS
        cache_bytes = 4 * rows * self.context * self.num_kv_heads * HEAD_SIZE
        return 1e6 * (limit_s + cache_bytes / COPIED_BYTES_S)


class Decodes:
    """The attention of one token a sequence over ``context`` tokens of each, layer by layer."""

    def __init__(self, sizes: Sizes, rows: int) -> None:
        blocks = -(-sizes.context // BLOCK_TOKENS)
        heads, count = sizes.num_kv_heads, rows * blocks
        shape = (count, NUM_LAYERS, 2, heads, BLOCK_TOKENS, HEAD_SIZE)
        self._cache = torch.randn(shape, device=DEVICE, dtype=DTYPE).transpose(3, 4)
        order = torch.randperm(count, device=DEVICE).to(torch.int32)
        lengths = torch.full((rows,), sizes.context, dtype=torch.int32, device=DEVICE)
        self._metadata = functools.partial(
            AttentionMetadata,
            query_start_loc=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=lengths,
            block_tables=order.view(rows, blocks),
            slot_mapping=lengths,
            max_query_len=1,
            max_seq_len=sizes.context,
            num_decodes=rows,
        )
        self._angles = torch.randn((sizes.context, HEAD_SIZE), device=DEVICE)
        self._spec = AttentionSpec(scale=HEAD_SIZE**-0.5)
        self._attend = HopperDecodes(DEVICE, DTYPE)

    def step(self) -> AttentionMetadata:
        """The metadata of a new step, whose layers share a plan."""
        return self._metadata()

    def __call__(self, heads: Tensor, layer: int, step: AttentionMetadata) -> Tensor:
        """[T, A * H] to [T, N * H]."""
        rows = len(heads)
        found = self._attend.rotated(
            heads.view(rows, -1, HEAD_SIZE), self._angles, self._cache[:, layer], step,
            self._spec,
        )  # fmt: skip
        if found is None:
            raise ValueError(f"our kernel does not rotate heads of {heads.shape}: no --context")
        return found.view(rows, -1)


class Layers:
    """Some layers on the GPU, and the time of one layer."""

    def __init__(self, sizes: Sizes, sustained_rows: int, trial_s: float) -> None:
        self.sizes = sizes
        self._sustained_rows, self._trial_s = sustained_rows, trial_s
        self._weights = [
            [_drawn(product.outputs, product.inner) for product in sizes.of_layer]
            for _ in range(NUM_LAYERS)
        ]
        self._head = _drawn(sizes.logits.outputs, sizes.logits.inner)
        self._scale = torch.ones(sizes.logits.inner, device=DEVICE, dtype=DTYPE)
        self._decodes: tuple[int, Decodes] | None = None

    def time_us(self, rows: int, choices: dict[Product, Choice]) -> float:
        """Median time of a layer with these cuts, or its mean under load."""
        table = {product.name: [(rows, numbers_of(cut))] for product, cut in choices.items()}
        return self.timed_us(rows, HopperProducts(DEVICE, DTYPE, table=ProductTable(table)))

    def warm(self, rows: int, choices: dict[Product, Choice]) -> None:
        """Run until the GPU is as warm as under load, before the timing."""
        ends = time.monotonic() + (_WARM_S if rows >= self._sustained_rows else 0.0)
        self.time_us(rows, choices)
        while time.monotonic() < ends:
            self.time_us(rows, choices)

    def timed_us(self, rows: int, products: HopperProducts) -> float:
        """The same by any products."""
        x, residual = (50 * _drawn(rows, self.sizes.logits.inner) for _ in range(2))
        decodes = self._decodes_of(rows)
        graph = captured(lambda: self._run(products, decodes, x, residual))
        if rows < self._sustained_rows:
            return 1e6 * statistics.median(replays_s(graph) for _ in range(7)) / NUM_LAYERS
        once_s = replays_s(graph, 2)
        replays_s(graph, int(0.4 * self._trial_s / once_s) + 1)
        return 1e6 * replays_s(graph, int(0.6 * self._trial_s / once_s) + 1) / NUM_LAYERS

    def _decodes_of(self, rows: int) -> Decodes | None:
        if not self.sizes.context:
            return None
        if self._decodes is None or self._decodes[0] != rows:
            self._decodes = rows, Decodes(self.sizes, rows)
        return self._decodes[1]

    def _run(
        self, products: HopperProducts, decodes: Decodes | None, x: Tensor, residual: Tensor
    ) -> None:
        scale = self._scale
        change: Tensor | None = None
        step = decodes.step() if decodes else None
        for layer, (gate_up, down, out, qkv) in enumerate(self._weights):
            heads = products.linear(self._norm(x, residual, change), qkv)
            if decodes is not None and step is not None:
                attended = decodes(heads, layer, step)
            else:
                # The stand-in reads heads too, and returns as much as the queries.
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
        if self.sizes.has_sums:
            return products.linear_parts(x, weight)
        return products.add_linear(x, weight, residual)

    def _norm(self, x: Tensor, residual: Tensor, change: Tensor | None) -> Tensor:
        if change is None:
            return triton_norm.rms_norm(x, self._scale, 1e-5)
        return triton_norm.rms_norm(change, self._scale, 1e-5, residual)


def _drawn(rows: int, columns: int) -> Tensor:
    return 0.02 * torch.randn((rows, columns), device=DEVICE, dtype=DTYPE)


class Candidates:
    """The candidates for a product: the likeliest and the requested tile shapes."""

    def __init__(self, num_cuts: int, also: dict[str, list[list[int]]]) -> None:
        self._num_cuts = num_cuts
        self._also = also

    def cuts(self, product: Product, rows: int) -> list[GemmShape | SkinnyShape]:
        """Each candidate once; ValueError if a requested one is impossible."""
        asked = [GemmShape(*cut) for cut in self._also.get(product.name, ())]
        for cut in asked:
            cut.check(product.kind)
        return list(dict.fromkeys([*asked, *product.likely_cuts(rows, self._num_cuts)]))


def tune(
    layers: Layers, rows: int, table: ProductTable, candidates: Candidates
) -> dict[Product, Choice]:
    """The best tile shape of each product for a number of rows, starting from the table's."""
    products = layers.sizes.products(rows)
    best = {
        product: table.pick(rows, product.outputs, product.inner, product.kind)
        for product in products
    }
    layers.warm(rows, best)
    best_us = first_us = layers.time_us(rows, best)
    torch_us = layers.time_us(rows, dict.fromkeys(best))
    for product in layers.sizes.tuned(rows):
        cuts: list[Choice] = [None, *candidates.cuts(product, rows)]
        best, best_us = _best_of(layers, rows, best, product, cuts)
        if isinstance(cut := best[product], GemmShape):
            paced = [replace(cut, max_early=tiles) for tiles in _EARLY_TILES]
            best, best_us = _best_of(layers, rows, best, product, paced)
    told = ", ".join(f"{product.name} {numbers_of(cut)}" for product, cut in best.items())
    limit_us = layers.sizes.limit_us(rows)
    print(
        f"{rows:5d} rows: torch {torch_us:.1f} us a layer, before {first_us:.1f}, now "
        f"{best_us:.1f}, which is {100 * limit_us / best_us:.0f} % of {limit_us:.1f}: {told}",
        flush=True,
    )
    return best


def _best_of(
    layers: Layers,
    rows: int,
    best: dict[Product, Choice],
    product: Product,
    cuts: Sequence[Choice],
) -> tuple[dict[Product, Choice], float]:
    """The best choices and their time, with one of these tile shapes for a product or
    unchanged.
    """
    # A GPU that became warmer would make all of them look worse.
    best_us = layers.time_us(rows, best)
    for cut in cuts:
        trial = {**best, product: cut}
        if cut == best[product] or layers.time_us(rows, trial) >= 0.997 * best_us:
            continue
        # The clock may have changed meanwhile.
        best_us = layers.time_us(rows, best)
        if (time_us := layers.time_us(rows, trial)) < 0.997 * best_us:
            best_us, best = time_us, trial
    return best, best_us


def compile_all(sizes: Sizes, row_counts: list[int], candidates: Candidates) -> int:
    """Compile all timed kernels in parallel; returns their number."""
    jobs = {
        (cut, product.kind)
        for rows in row_counts
        for product in sizes.tuned(rows)
        for cut in candidates.cuts(product, rows)
    }
    with ThreadPoolExecutor(max_workers=16) as pool:
        list(pool.map(lambda job: compile_choice(job[0], DTYPE, job[1]), jobs))
    return len(jobs)


def flags() -> argparse.ArgumentParser:
    """The candidates of each product."""
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
    parser.add_argument("--kinds", nargs="+", choices=get_args(Kind), default=get_args(Kind))
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that share the weights")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens of a decode's attention; 0: a norm"
    )
    parser.add_argument("--sustained-rows", type=int, default=SUSTAINED_ROWS)
    parser.add_argument("--trial-seconds", type=float, default=1.0)
    parser.add_argument("--also", type=Path, help="JSON: more cuts to time, by product")
    parser.add_argument("--compile-only", action="store_true")
    return parser


def main() -> None:
    """See the module's docstring."""
    args = flags().parse_args()
    if not (args.compile_only or torch.cuda.is_available()):
        raise SystemExit("torch finds no GPU here: run this on a machine with one")
    entries = json.loads(args.output.read_text()) if args.output.exists() else {}
    sizes, start = Sizes(args), time.monotonic()
    candidates = Candidates(args.cuts, json.loads(args.also.read_text()) if args.also else {})
    count = compile_all(sizes, args.rows, candidates)
    print(f"compiled {count} in {time.monotonic() - start:.1f} s", flush=True)
    if args.compile_only:
        return
    layers = Layers(sizes, args.sustained_rows, args.trial_seconds)
    for rows in args.rows:
        for product, cut in tune(layers, rows, ProductTable(entries), candidates).items():
            steps = dict(entries.get(product.name, ()))
            steps[rows] = numbers_of(cut)
            entries[product.name] = [[most, steps[most]] for most in sorted(steps)]
        # The table needs no entry for products that torch always computes fastest.
        kept = {key: steps for key, steps in entries.items() if any(cut for _, cut in steps)}
        lines = [f'"{key}": {json.dumps(steps)}' for key, steps in sorted(kept.items())]
        args.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
