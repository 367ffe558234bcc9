"""The time of one product with a tile shape, behind and before the norms of a layer."""

from __future__ import annotations

import statistics
from dataclasses import astuple

import torch
from torch import Tensor

from trimaran.kernels.products import HopperProducts
from trimaran.kernels.tables.product_table import (
    Choice,
    GemmShape,
    ProductTable,
    SkinnyShape,
)
from trimaran.kernels.triton.norm import rms_norm
from trimaran.kernels.tuning.graph_timing import captured, replays_s
from trimaran.kernels.tuning.product_candidates import Product

_CACHE_BYTES = 256e6
"""Bytes of different weights in a row: more than the GPU's cache."""

_MAX_COPIES = 24
_REPLAYS = 5
_EPSILON = 1e-5
_USUAL = astuple(GemmShape(0, 0))


def numbers_of(cut: Choice) -> list[int] | None:
    """A table's entry for a tile shape, without defaults at its end."""
    if cut is None:
        return None
    if isinstance(cut, SkinnyShape):
        return [-cut.tokens, cut.lines, cut.split, cut.shared_kib]
    numbers = [int(each) for each in astuple(cut)]
    while len(numbers) > 4 and numbers[-1] == int(_USUAL[len(numbers) - 1]):
        numbers.pop()
    return numbers


class ProductTimer:
    """Times one product in a chain of equal products by different weights.

    A norm precedes each product, as in a layer, and kernels overlap. The parts of a product
    are added up by another norm, which counts too.
    """

    def __init__(self, product: Product, device: torch.device, dtype: torch.dtype) -> None:
        self._product, self._device, self._dtype = product, device, dtype
        num_bytes = 2 * product.outputs * product.inner
        count = max(2, min(_MAX_COPIES, -(-int(_CACHE_BYTES) // num_bytes)))
        shape = (product.outputs, product.inner)
        self._weights = [0.02 * self._random(*shape) for _ in range(count)]
        self._inner_scale = torch.ones(product.inner, device=device, dtype=dtype)
        self._outer_scale = torch.ones(product.outputs, device=device, dtype=dtype)

    def time_us(self, rows: int, cut: Choice) -> float:
        """Median time of one product of ``rows`` and its norms; None: by the derived rule."""
        table = ProductTable({self._product.name: [(rows, numbers_of(cut))]})
        products = HopperProducts(self._device, self._dtype, table=table)
        x, residual = (self._random(rows, size) for size in self._sizes)
        graph = captured(lambda: self._run(products, x, residual))
        median = statistics.median(replays_s(graph) for _ in range(_REPLAYS))
        return 1e6 * median / len(self._weights)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._product.inner, self._product.outputs

    def _run(self, products: HopperProducts, x: Tensor, residual: Tensor) -> None:
        for weight in self._weights:
            normed = rms_norm(x, self._inner_scale, _EPSILON)
            if self._product.kind == "gated":
                products.gated_linear(normed, weight)
            elif self._product.kind == "plain":
                products.linear(normed, weight)
            else:
                change = products.add_linear(normed, weight, residual)
                added = (residual, None) if change is None else (change, residual)
                rms_norm(added[0], self._outer_scale, _EPSILON, added[1])

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)
