"""A product of a layer, and tile shapes that are likely to be fast on an H200."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimaran.kernels.tables.product_table import INNER_STEP, GemmShape, Kind, SkinnyShape

SUSTAINED_ROWS = 512
"""Rows from which a GPU is under full load, whatever the tile shape."""

_FLOPS_S, COPIED_BYTES_S = 674e12, 4.25e12
"""The rates that one H200 sustains, as the limit beside times."""

_HALF_RING = 113_664
"""Bytes of a ring that leaves room for another block of the same size."""

_MAX_HALF_COLUMNS = 128
"""Wider tiles of more than 64 rows take all registers of a multiprocessor."""

# The least cost of a block's step, by resource: to rank tile shapes, not to predict times.
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
        """The table's key."""
        return f"{self.outputs}x{self.inner} {self.kind}"

    def estimate_s(self, rows: int, cut: GemmShape) -> float:
        """An estimate of a tile shape's time."""
        wide, high = (1, cut.sharing) if cut.shares_weights else (cut.sharing, 1)
        groups = -(-rows // (cut.rows * high)) * -(-self.outputs // (cut.columns * wide))
        if self.kind == "parts":
            groups *= cut.split
        exact_rounds = groups / _CLUSTERS[cut.cluster(self.kind)]
        rounds: float = math.ceil(exact_rounds)
        if rows >= SUSTAINED_ROWS:
            # Idle multiprocessors leave their power to busy multiprocessors.
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

    def likely_cuts(self, rows: int, count: int) -> list[GemmShape | SkinnyShape]:
        """The tile shapes with the least estimates, at most two of equal tiles, and shorter
        rings; and those of few rows.
        """
        found: list[GemmShape] = []
        if not count:
            return []
        for cut in sorted(self._cuts(rows), key=lambda cut: self.estimate_s(rows, cut)):
            tile = (cut.rows, cut.columns)
            if sum((other.rows, other.columns) == tile for other in found) < 2:
                found.append(cut)
            if len(found) == count:
                break
        shorter = (cut for each in found[:3] for cut in self._shorter(each))
        return [*found, *shorter, *self._skinny_cuts(rows)]

    def _skinny_cuts(self, rows: int) -> Iterator[SkinnyShape]:
        """Tiles that keep all processors busy with one part of the inner dimension, or with a
        few."""
        if rows > SkinnyShape.MAX_ROWS:
            return
        columns = self.outputs // 2 if self.kind == "gated" else self.outputs
        for split in (1, 2, 4) if self.kind == "parts" else (1,):
            lines = SkinnyShape.even_lines(columns, _CLUSTERS[1] // split)
            for shared_kib in (215, 106):
                cut = replace(SkinnyShape.of_rows(rows, lines, split), shared_kib=shared_kib)
                has_parts = self.inner >= split * INNER_STEP * cut.panels(self.kind)
                if has_parts and self.outputs % 32 == 0 and cut.stages(self.kind) > 2:
                    yield cut

    def limit_s(self, rows: int) -> float:
        """The least time for its bytes or its arithmetic."""
        made = self.outputs // 2 if self.kind == "gated" else self.outputs
        moved = 2 * (self.outputs * self.inner + rows * (self.inner + made))
        operations = 2 * rows * self.outputs * self.inner
        return max(moved / COPIED_BYTES_S, operations / _FLOPS_S)

    def _shorter(self, cut: GemmShape) -> Iterator[GemmShape]:
        """The tile shape with a ring that leaves room for another block, if registers do."""
        stages = _HALF_RING // cut.stage_bytes
        is_light = cut.rows == 64 or (cut.rows == 128 and cut.columns <= _MAX_HALF_COLUMNS)
        shorter = replace(cut, max_stages=stages)
        if is_light and 3 <= stages < cut.stages and self._can_be(shorter):
            yield shorter

    def _can_be(self, cut: GemmShape) -> bool:
        try:
            cut.check(self.kind)
        except ValueError:
            return False
        return True

    def _cuts(self, rows: int) -> Iterator[GemmShape]:
        tiles = [tile for tile in (64, 128, 192, 256) if tile - 64 < rows]
        for tile in tiles[-2:] if rows <= 128 else tiles[1:]:
            for columns in range(64, 257 if tile <= 128 else 193, 16):
                yield from self._fitting(rows, tile, columns)

    def _fitting(self, rows: int, tile: int, columns: int) -> Iterator[GemmShape]:
        for split in range(1, 9):
            for sharing in (1, 2, 4):
                cut = GemmShape(tile, columns, split, sharing)
                if cut.cluster(self.kind) > 8 or cut.stages < 3:
                    continue
                if split > -(-self.inner // INNER_STEP):
                    continue
                shared = replace(cut, shares_weights=True)
                if self._can_be(cut):
                    yield cut
                if rows > tile * (sharing - 1) and self._can_be(shared):
                    yield shared
