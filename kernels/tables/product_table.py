"""Tile shapes of our Hopper product kernel, and the measured choice for each product."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, cast

TABLES = Path(__file__).parent

INNER_STEP = 64
"""Elements of the inner dimension in one stage of the kernel's ring."""

_SHARED_BYTES = 230_400
"""Dynamic shared memory available to a block beside its barriers."""

_EARLY_BYTES = 64 << 10
"""Bytes of weights in flight to a block that saturate memory with a short queue."""

_STAGE_BYTES = 12 << 10
"""Least bytes of weights in a stage of few rows: barriers of smaller stages cost time."""

_OPERAND_ROWS = 64
"""Rows of the left operand of the matrix units."""

Kind = Literal["plain", "gated", "parts"]
"""``x @ weight.T``; SwiGLU of the product; or float32 parts that are still to be added up."""

Bytes = Literal["", "FP8", "INT8"]
"""The numbers of one byte that a kernel multiplies; empty: bfloat16 or float16."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Tile shape of one launch of a product; see ``cuda/gemm.cu``.

    A block computes ``rows`` x ``columns`` of the product at a time: 64, 128, 192 or 256, and a
    multiple of 16 up to 256. ``split`` blocks share the inner dimension; ``sharing`` blocks
    share rows of x, or of the weight with ``shares_weights``. A cluster has at most 8 blocks in
    all; blocks of parts do not count. The ring has at most ``max_stages``: a shorter ring
    leaves room for the next kernel's blocks, which then begin to read while this kernel runs.
    Before the rows of x are ready, a block has ``max_early`` tiles of weights in flight (0:
    `_EARLY_BYTES`): more would lengthen the memory queue of the kernel that writes the rows.
    """

    rows: int
    columns: int
    split: int = 1
    sharing: int = 1
    max_stages: int = 16
    max_early: int = 0
    shares_weights: bool = False

    def check(self, kind: Kind) -> None:
        """Raise ValueError unless the kernel supports this shape for a product of this kind."""
        if self.rows not in (64, 128, 192, 256) or not 16 <= self.columns <= 256:
            raise ValueError(f"{self} is no tile: take 64 to 256 rows and 16 to 256 columns")
        if self.columns % 16 or min(self.split, self.sharing) < 1:
            raise ValueError(f"{self} takes a multiple of 16 columns, and blocks of 1 or more")
        if self.shares_weights:
            self._check_slices(kind)
        ring, bytes_needed = self.stages * self.stage_bytes, self._exchanged_bytes(kind)
        if bytes_needed > ring:
            raise ValueError(
                f"{self} needs {bytes_needed} bytes of shared memory for partial sums but has "
                f"{ring}: take fewer columns or another split"
            )

    def _check_slices(self, kind: Kind) -> None:
        columns = self.columns // 2 if kind == "gated" else self.columns
        if self.sharing == 1 or columns % (8 * self.sharing):
            raise ValueError(
                f"{self} shares {columns} columns among {self.sharing} blocks: take 2 blocks "
                "or more, and a multiple of 8 columns for each"
            )
        if kind != "parts" and self.split > 1:
            raise ValueError(
                f"{self} adds up in clusters, which must share rows of x: set "
                "shares_weights to false"
            )

    def cluster(self, kind: Kind) -> int:
        """Blocks of a cluster."""
        return self.sharing if kind == "parts" else self.sharing * self.split

    def _exchanged_bytes(self, kind: Kind) -> int:
        """Shared memory for partial sums that a block makes and receives."""
        if kind == "parts" or self.split == 1:
            return 0
        sums = 2 if kind == "gated" else 1
        pitch = 8 * (sums * -(-self.columns // 8 // sums // self.split) + 1)
        return (2 * self.split - 1) * self.rows * 4 * pitch

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return {64: 1, 128: 2, 192: 3, 256: 2}[self.rows]

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of the ring."""
        return 2 * INNER_STEP * (self.rows + self.columns)

    @property
    def ring_bytes(self) -> int:
        """Shared memory for stages."""
        return _SHARED_BYTES

    @property
    def stages(self) -> int:
        """The largest allowed number of stages that fit."""
        return min(self.max_stages, self.ring_bytes // self.stage_bytes)

    @property
    def early_tiles(self) -> int:
        """Tiles of weights in flight before the rows of x are ready."""
        return self.max_early or _EARLY_BYTES // (2 * INNER_STEP * self.columns)


@dataclass(frozen=True, slots=True)
class SkinnyShape:
    """Tile shape of one launch of a product of few rows; see ``cuda/csrc/skinny_gemm.cu``."""

    MAX_ROWS: ClassVar[int] = 64
    _TOKENS: ClassVar[tuple[int, ...]] = (8, 16, 32, 64)
    _MAX_LINES: ClassVar[int] = 128

    tokens: int
    """Most rows of x: 8, 16, 32 or 64."""

    lines: int
    """Rows of the weight in a tile, a multiple of 8; as many gate rows as up rows if gated."""

    split: int = 1
    """Parts of the inner dimension; 1 unless the product is one of parts."""

    shared_kib: int = 215
    """Shared memory of a block. With 106, half of a processor's, blocks of other kernels run
    beside this one. That suits products of few weights before and behind attention."""

    early_bytes: int = _EARLY_BYTES

    @classmethod
    def of_rows(cls, num_rows: int, lines: int, split: int = 1) -> SkinnyShape:
        """The shape for 1 to `MAX_ROWS` rows of x."""
        return cls(next(each for each in cls._TOKENS if num_rows <= each), lines, split)

    @staticmethod
    def even_lines(columns: int, processors: int) -> int:
        """The ``lines`` by which each processor reads about as many weights, in the fewest
        turns of at most as many lines as the left operand has."""
        turns = -(-columns // (processors * _OPERAND_ROWS))
        return -(-columns // (turns * processors * 8)) * 8

    @classmethod
    def even_parts(cls, columns: int, processors: int, most: int) -> tuple[int, int]:
        """The ``lines`` and the largest split up to ``most`` by which all parts are multiplied
        at once, each processor reads about as many weights, and the left operand is filled
        best."""
        split = 1
        while split < most and -(-columns // _OPERAND_ROWS) * (split + 1) <= processors:
            split += 1
        return cls.even_lines(columns, processors // split), split

    def check(self, kind: Kind) -> None:
        """Raise ValueError unless the kernel supports this shape for a product of this kind."""
        is_tile = 8 <= self.lines <= self._MAX_LINES and self.lines % 8 == 0
        if self.tokens not in self._TOKENS or not is_tile:
            raise ValueError(
                f"{self} is no tile: take 8, 16, 32 or 64 tokens, and a multiple of 8 lines up "
                f"to {self._MAX_LINES}"
            )
        if self.split < 1 or (self.split > 1 and kind != "parts"):
            raise ValueError(f"{self} splits the inner dimension: take parts, or a split of 1")
        if self.stages(kind) < 2:
            raise ValueError(f"{self} has no room for two stages: take fewer lines or tokens")

    def panels(self, kind: Kind) -> int:
        """Steps of 128 bytes of the inner dimension in a stage of the ring."""
        return max(1, -(-_STAGE_BYTES // self._weight_bytes(kind)))

    def stage_bytes(self, kind: Kind) -> int:
        """Shared memory of a stage."""
        rows = 2 * INNER_STEP * self.tokens
        return self.panels(kind) * (self._weight_bytes(kind) + rows)

    def stages(self, kind: Kind) -> int:
        """Stages that fit."""
        return ((self.shared_kib << 10) - self.spare_bytes) // self.stage_bytes(kind)

    @property
    def spare_bytes(self) -> int:
        """Shared memory behind the ring that the left operand may reach, and for alignment."""
        beyond = -self.lines % _OPERAND_ROWS - self.tokens
        return 2 * INNER_STEP * max(beyond, 0) + 1024

    def early_stages(self, kind: Kind) -> int:
        """Stages of weights in flight before the rows of x are ready."""
        return max(1, self.early_bytes // (self.panels(kind) * self._weight_bytes(kind)))

    def _weight_bytes(self, kind: Kind) -> int:
        return 2 * INNER_STEP * self.lines * (2 if kind == "gated" else 1)


Choice = GemmShape | SkinnyShape | None
"""The tile shape of a product; None means torch."""


def _shape(numbers: list[int]) -> GemmShape | SkinnyShape:
    """The fields of a table's entry, and their defaults. A negative first number is that of the
    tokens of a `SkinnyShape`."""
    if numbers[0] < 0:
        tokens, *rest = numbers
        return SkinnyShape(-tokens, *rest)
    usual = (0, 0, 1, 1, 16, 0, 0)
    rows, columns, split, sharing, stages, early, shares = (*numbers, *usual[len(numbers) :])
    return GemmShape(rows, columns, split, sharing, stages, early, bool(shares))


class ProductTable:
    """Measured choices for one device: for each weight, the best up to a number of rows.

    Above the last entry, and for unmeasured weights, torch multiplies. A file maps ``outputs x
    inner kind`` to a list of ``[most rows, null or the fields of a `GemmShape`]``; all fields
    behind the fourth are optional. A negative number of rows is that of the tokens of a
    `SkinnyShape`, followed by its next fields. ``benchmarks/tune_products.py`` writes the
    file.
    """

    def __init__(self, entries: dict[str, list[tuple[int, list[int] | None]]]) -> None:
        self._bounds: dict[tuple[int, int, Kind], list[int]] = {}
        self._choices: dict[tuple[int, int, Kind], list[Choice]] = {}
        for name, steps in entries.items():
            sizes, _, kind = name.partition(" ")
            outputs, _, inner = sizes.partition("x")
            key = (int(outputs), int(inner), cast(Kind, kind))
            self._bounds[key] = [most for most, _ in steps]
            self._choices[key] = [_shape(cut) if cut else None for _, cut in steps]

    @classmethod
    def of_device(cls, name: str) -> ProductTable:
        """The table of a GPU by its name; an empty table if the GPU was not measured."""
        return cls(cls.shipped(name))

    @staticmethod
    def shipped(name: str) -> dict[str, list[tuple[int, list[int] | None]]]:
        """The entries that the package has for a GPU."""
        return shipped_entries(name, "")

    def check(self) -> None:
        """Raise ValueError unless all entries are valid: rising row counts, and tile shapes
        that the kernel supports."""
        for (outputs, inner, kind), bounds in self._bounds.items():
            check_bounds(f"{outputs}x{inner} {kind}", bounds)
            for choice in self.choices(outputs, inner, kind):
                choice.check(kind)

    def pick(self, num_rows: int, outputs: int, inner: int, kind: Kind) -> Choice:
        """The choice for a product of ``num_rows`` with a weight [outputs, inner]."""
        key = (outputs, inner, kind)
        bounds = self._bounds.get(key)
        if bounds is None or num_rows > bounds[-1]:
            return None
        return self._choices[key][bisect_left(bounds, num_rows)]

    def weights(self) -> list[tuple[int, int, Kind]]:
        """Outputs, inner width and kind of the measured products."""
        return list(self._choices)

    def choices(self, outputs: int, inner: int, kind: Kind) -> list[GemmShape | SkinnyShape]:
        """All of our kernel's tile shapes for a weight."""
        found = self._choices.get((outputs, inner, kind), [])
        return list(dict.fromkeys(choice for choice in found if choice is not None))


def shipped_entries(card: str, suffix: str) -> dict[str, list[tuple[int, list[int] | None]]]:
    """The entries of the package's table for a GPU by its name; none if not measured."""
    path = TABLES / f"{card.lower().replace(' ', '_')}{suffix}.json"
    if not path.exists():
        return {}
    found: dict[str, list[tuple[int, list[int] | None]]]
    found = json.loads(path.read_text(encoding="utf-8"))
    return found


def check_bounds(name: str, bounds: list[int]) -> None:
    """Raise ValueError unless a weight's numbers of rows rise, from 1 on."""
    if not bounds or bounds[0] < 1 or bounds != sorted(set(bounds)):
        raise ValueError(f"{name} has entries up to {bounds} rows, which must rise")


def fixed_choice(num_rows: int, outputs: int, inner: int) -> GemmShape:
    """A tile shape whose split depends on the weight alone, for any number of rows.

    The split lets one row's product use most of the GPU. The order of the sums is equal for all
    tile shapes of equal split.
    """
    split = 1
    while split < 8 and outputs * split < 96 * 128 and 2 * split * INNER_STEP <= inner:
        split *= 2
    # Partial sums of 256 rows would not fit.
    rows = 64 if num_rows <= 64 else 256 if num_rows > 128 and split == 1 else 128
    return GemmShape(rows, 128, split)
