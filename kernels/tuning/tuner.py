"""Measures the choices of kernels for an engine's products and experts on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from os import sched_getaffinity

import torch

from trimaran.kernels.cuda.grouped_gemm import compile_grouped
from trimaran.kernels.cuda.skinny_gemm import compile_choice
from trimaran.kernels.tables.grouped_table import (
    Cut,
    GroupedKind,
    GroupedShape,
    expert_limit,
)
from trimaran.kernels.tables.tuned_choices import Entries
from trimaran.kernels.tuning.expert_candidates import MixtureSizes, likely_cuts
from trimaran.kernels.tuning.expert_timing import ExpertTimer
from trimaran.kernels.tuning.product_candidates import Product
from trimaran.kernels.tuning.product_timing import ProductTimer, numbers_of
from trimaran.kernels.tuning.search import best_pair, best_product

ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TRIAL_S = 0.15
_DOWN_STEP = 8

Report = Callable[[int, str], None]
"""Takes the number of finished steps and a description of the next one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One weight and number of rows: the time by the derived rule, and the best time."""

    name: str
    rows: int
    derived_us: float
    best_us: float
    numbers: tuple[int, ...] | None
    """The best tile shape; None if the derived rule chooses the fastest kernel."""


class Tuner:
    """Times every product and every stack of experts, after one compilation of all kernels.

    ``num_cuts`` is the number of tile shapes that are tried for a product and a number of
    rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        products: Sequence[Product],
        mixtures: Sequence[MixtureSizes],
        *,
        max_rows: int = ROWS[-1],
        max_tokens: int = TOKENS[-1],
        num_cuts: int = 6,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._products, self._mixtures = list(products), list(mixtures)
        self._rows = [rows for rows in ROWS if rows <= max_rows]
        self._tokens = [tokens for tokens in TOKENS if tokens <= max_tokens]
        self._num_cuts = num_cuts
        self.measured: list[Measured] = []

    @property
    def num_steps(self) -> int:
        """Steps that `run` reports."""
        products = len(self._products) * len(self._rows)
        return 1 + products + len(self._mixtures) * len(self._tokens)

    def run(self, report: Report) -> tuple[Entries, Entries]:
        """The entries of products and of experts; takes seconds, on an otherwise idle GPU."""
        report(0, "compiling candidates")
        self._compile_all()
        done = 1
        products: Entries = {}
        for product in self._products:
            timer = ProductTimer(product, self._device, self._dtype)
            steps: list[tuple[int, list[int] | None]] = []
            for rows in self._rows:
                report(done, f"{product.name}, {rows} rows")
                steps.append((rows, self._tuned(timer, product, rows)))
                done += 1
            products[product.name] = steps
            del timer
            torch.cuda.empty_cache()
        experts: Entries = {}
        for sizes in self._mixtures:
            experts |= self._tuned_experts(sizes, partial(_report_from, report, done))
            done += len(self._tokens)
            torch.cuda.empty_cache()
        report(done, "measured")
        return products, experts

    def _tuned(self, timer: ProductTimer, product: Product, rows: int) -> list[int] | None:
        cuts = product.likely_cuts(rows, self._num_cuts)
        best, first_us, best_us = best_product(partial(timer.time_us, rows), cuts)
        numbers = numbers_of(best)
        self._note(product.name, rows, first_us, best_us, numbers)
        return numbers

    def _tuned_experts(self, sizes: MixtureSizes, report: Report) -> Entries:
        timer = ExpertTimer(sizes, self._device, self._dtype, _TRIAL_S)
        entries: Entries = {name: [] for name in sizes.names}
        for number, tokens in enumerate(self._tokens):
            report(number, f"{sizes.experts} experts of {sizes.inner}, {tokens} tokens")
            cuts = list(_allowed(sizes, tokens))
            best, first_us, best_us = best_pair(partial(timer.time_us, tokens), cuts)
            for name, cut in zip(sizes.names, best or (None, None), strict=True):
                numbers = None if cut is None else list(astuple(cut))
                entries[name].append((tokens * sizes.chosen, numbers))
                self._note(name, tokens * sizes.chosen, first_us, best_us, numbers)
        return entries

    def _note(
        self, name: str, rows: int, first_us: float, best_us: float, numbers: list[int] | None
    ) -> None:
        shown = None if numbers is None else tuple(numbers)
        self.measured.append(Measured(name, rows, first_us, best_us, shown))

    def _compile_all(self) -> None:
        """Compile all kernels of our own that are timed, side by side."""
        gemms = {
            (cut, self._dtype, product.kind)
            for product in self._products
            for rows in self._rows
            for cut in product.likely_cuts(rows, self._num_cuts)
        }
        kinds: tuple[GroupedKind, ...] = ("gated", "plain")
        grouped = {
            (cut, self._dtype, kind, expert_limit(sizes.experts))
            for sizes in self._mixtures
            for tokens in self._tokens
            for cut in _allowed(sizes, tokens)
            if isinstance(cut, GroupedShape)
            for kind in kinds
        }
        with ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
            ours = [pool.submit(compile_choice, *job) for job in gemms]
            others = [pool.submit(compile_grouped, *job) for job in grouped]
            for job in ours:
                job.result()
            for other in others:
                other.result()


def _report_from(report: Report, first: int, number: int, text: str) -> None:
    report(first + number, text)


def _allowed(sizes: MixtureSizes, tokens: int) -> list[Cut]:
    """The candidates that take these sizes."""
    is_whole = not (sizes.inner % _DOWN_STEP or sizes.hidden % _DOWN_STEP)
    found = list(likely_cuts(tokens, sizes))
    return [cut for cut in found if is_whole or not isinstance(cut, GroupedShape)]
