"""A mixture's sizes, and tile shapes of its grouped products that are likely to be fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trimaran.kernels.tables.grouped_table import Cut, GroupedShape, TritonCut, stack_name

MEMORY_BYTES_S, FLOPS = 4.28e12, 680e12
"""The rates that one H200 sustains, as the limit beside times."""


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """The sizes of a layer's experts on one rank."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    parts: int = 1
    """Factor of ``experts`` for the total, which ranks divide; the first ones are here."""

    @property
    def names(self) -> tuple[str, str]:
        """A table's keys of the gated and of the plain product."""
        return (
            stack_name((self.experts, 2 * self.inner, self.hidden), "gated"),
            stack_name((self.experts, self.hidden, self.inner), "plain"),
        )

    def average_rows(self, tokens: int) -> int:
        """Rows of an expert, if tokens choose each expert equally often."""
        return -(-tokens * self.chosen // (self.experts * self.parts))

    def limit_us(self, tokens: int) -> float:
        """The least time that an H200's memory and multipliers allow."""
        read = self.experts * (1 - (1 - self.chosen / self.experts / self.parts) ** tokens)
        moved = 2.0 * (3 * read * self.hidden * self.inner + 2 * tokens * self.hidden)
        flops = 6.0 * tokens * self.chosen * self.hidden * self.inner / self.parts
        return max(moved / MEMORY_BYTES_S, flops / FLOPS) * 1e6


def likely_cuts(tokens: int, sizes: MixtureSizes) -> Iterator[Cut]:
    """Tile shapes worth a measurement: an expert's rows in one run where possible."""
    average = sizes.average_rows(tokens)
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
