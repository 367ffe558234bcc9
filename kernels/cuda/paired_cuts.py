"""The cuts of products of many rows of bytes on Hopper: pairs of blocks share weights, and an
estimate of time chooses the tile."""

from __future__ import annotations

import functools

from trimaran.kernels.tables.product_table import GemmShape, Kind

_ROWS = 128
_COLUMNS = (64, 96, 128, 160, 192, 224, 256)
"""Columns of tiles of `_ROWS` rows. A pair of blocks has tiles one above the other, and shares
its weights."""

_MAX_ROWS = 16384
"""Rows up to which the choice depends on their number."""

NUMBERS_OF_ROWS = range(_ROWS, _MAX_ROWS + 1, _ROWS)
"""Numbers of rows between which the choice is the same."""

_START = 24
"""Columns that take as long as the beginning and the end of a tile."""

_LEAST = 112
"""Columns below which a tile takes as long as one of so many: its rows are read in that time.

Measured on an H200: tiles of 96, 128, 192 and 256 columns and 4,096 inputs take 11, 13.3, 18.2
and 23.4 us."""


def tile_of(columns: int) -> GemmShape:
    """The tile with these columns."""
    return GemmShape(_ROWS, columns, 1, 2, shares_weights=True)


def widths(kind: Kind) -> list[int]:
    """The columns of tiles of a kind: each of a pair copies half of the weights, or of gates
    and of ups, eight rows at a time."""
    halves = 2 if kind == "gated" else 1
    return [columns for columns in _COLUMNS if columns // halves % 16 == 0]


@functools.lru_cache(maxsize=4096)
def choose(num_rows: int, outputs: int, processors: int, kind: Kind) -> GemmShape:
    """The tile whose waves have the fewest columns together, for a product that is whole or
    ``gated``."""

    def columns_of_waves(columns: int) -> int:
        waves = _waves(num_rows, outputs, processors, columns)
        return waves * (max(columns, _LEAST) + _START)

    return tile_of(min(reversed(widths(kind)), key=columns_of_waves))


def _waves(num_rows: int, outputs: int, processors: int, columns: int) -> int:
    """Tiles that a pair of blocks multiplies one after the other."""
    tiles = -(-min(num_rows, _MAX_ROWS) // (2 * _ROWS)) * -(-outputs // columns)
    return -(-tiles // _pairs(processors))


def _pairs(processors: int) -> int:
    """Pairs of blocks that run at once."""
    return max(processors // 2, 1)


def utilization(num_rows: int, outputs: int, processors: int, tile: GemmShape) -> float:
    """The share of the products of all waves that are results, for up to 16,384 rows."""
    waves = _waves(num_rows, outputs, processors, tile.columns)
    return num_rows * outputs / (waves * _pairs(processors) * 2 * _ROWS * tile.columns)
