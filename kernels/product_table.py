"""How our Hopper kernel cuts a product, and the measured choice of a cut for each product."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).with_name("tables")

INNER_STEP = 64
"""Of the inner dimension, what one stage of the kernel's ring holds."""

_SHARED_BYTES = 230_400
"""Dynamic shared memory that a block can have beside its barriers."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """How one launch cuts a product; see ``cuda/gemm.cu``.

    ``rows`` x ``columns`` of the product fall to a block at a time: 64, 128, 192 or 256, and
    a multiple of 16 up to 256. ``split`` blocks share the inner dimension, ``sharing`` blocks
    rows of x; at most 8 blocks in all make a cluster.
    """

    rows: int
    columns: int
    split: int = 1
    sharing: int = 1

    def __post_init__(self) -> None:
        ring = self.stages * self.stage_bytes
        if self.split > 1 and self._exchanged_bytes > ring:
            raise ValueError(
                f"{self} needs {self._exchanged_bytes} bytes of shared memory for partial sums "
                f"but has {ring}: take fewer columns or another split"
            )

    @property
    def _exchanged_bytes(self) -> int:
        """Shared memory for partial sums made and received, of a gated product at worst."""
        pitch = 8 * (2 * -(-self.columns // 16 // self.split) + 1)
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
    def stages(self) -> int:
        """As many as fit."""
        return min(16, _SHARED_BYTES // self.stage_bytes)


Choice = GemmShape | None
"""How our kernel cuts a product; None leaves it to torch."""


class ProductTable:
    """Measured choices for one device: for each weight, the best up to a number of rows.

    Above the last entry, and for weights that were not measured, torch multiplies. A file
    maps ``outputs x inner`` (with `` gated`` for SwiGLU) to a list of ``[most rows, null or
    [rows, columns, split, sharing]]``, and is written by ``benchmarks/tune_products.py``.
    """

    def __init__(self, entries: dict[str, list[tuple[int, list[int] | None]]]) -> None:
        self._bounds: dict[tuple[int, int, bool], list[int]] = {}
        self._choices: dict[tuple[int, int, bool], list[Choice]] = {}
        for name, steps in entries.items():
            sizes, _, kind = name.partition(" ")
            outputs, _, inner = sizes.partition("x")
            key = (int(outputs), int(inner), kind == "gated")
            self._bounds[key] = [most for most, _ in steps]
            self._choices[key] = [GemmShape(*cut) if cut else None for _, cut in steps]

    @classmethod
    def of_device(cls, name: str) -> ProductTable:
        """The table of a GPU by its name; an empty one if it was not measured."""
        path = TABLES / f"{name.lower().replace(' ', '_')}.json"
        if not path.exists():
            return cls({})
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def pick(self, num_rows: int, outputs: int, inner: int, is_gated: bool) -> Choice:
        """The choice for a product of ``num_rows`` with a weight [outputs, inner]."""
        key = (outputs, inner, is_gated)
        bounds = self._bounds.get(key)
        if bounds is None or num_rows > bounds[-1]:
            return None
        return self._choices[key][bisect_left(bounds, num_rows)]

    def choices(self, outputs: int, inner: int, is_gated: bool) -> list[GemmShape]:
        """All of our kernel's cuts for a weight."""
        found = self._choices.get((outputs, inner, is_gated), [])
        return list(dict.fromkeys(choice for choice in found if choice is not None))


def fixed_choice(num_rows: int, outputs: int, inner: int) -> GemmShape:
    """A cut whose split depends on the weight alone, for any number of rows.

    The split makes one row's product use most of the GPU; the order of its sums is the same
    for all cuts of equal split.
    """
    split = 1
    while split < 8 and outputs * split < 96 * 128 and 2 * split * INNER_STEP <= inner:
        split *= 2
    # Partial sums of 256 rows would not fit.
    rows = 64 if num_rows <= 64 else 256 if num_rows > 128 and split == 1 else 128
    return GemmShape(rows, 128, split)
