"""Tile shapes of grouped products, for our Hopper kernel or Triton's, and the measured best."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields
from typing import Literal, cast

from trimaran.kernels.tables.product_table import INNER_STEP, check_bounds, shipped_entries

_SHARED_BYTES = 232_448
"""Shared memory available to a block."""

_PLAN_BYTES, _BARRIER_BYTES, _ALIGNMENT = 8, 256, 1024
"""Shared memory for each expert, for all barriers, and for alignment of the tiles."""

EXPERT_LIMITS = (64, 256, 512)
"""Numbers of experts that the kernel is built for."""

INNER_MULTIPLE = 8
"""Inner widths and outputs that the kernel takes are multiples of this."""

GroupedKind = Literal["plain", "gated"]
"""``x @ weight[expert].T``, or SwiGLU of it."""


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """Tile shape of one launch of a grouped product; see ``cuda/grouped_gemm.cu``.

    A block takes ``weights`` rows of an expert's matrix, 64, 128 or 256, and up to ``rows``
    rows of x, a multiple of 16, at a time; ``sharing`` blocks share the weights.
    """

    weights: int
    rows: int
    sharing: int = 1

    def check(self, num_experts: int) -> None:
        """Raise ValueError unless the kernel can be built with this shape."""
        most = 192 if self.weights == 256 else 256
        if self.weights not in (64, 128, 256) or not 16 <= self.rows <= most or self.rows % 16:
            raise ValueError(
                f"{self} is no cut: take 64, 128 or 256 weights and a multiple of 16 rows, at "
                f"most {most} with {self.weights} weights"
            )
        if self.sharing not in (1, 2, 4):
            raise ValueError(f"{self} is no cut: take 1, 2 or 4 sharing blocks")
        if num_experts > EXPERT_LIMITS[-1]:
            raise ValueError(f"{num_experts} experts are above {EXPERT_LIMITS[-1]}")

    @property
    def warpgroups(self) -> int:
        """Warpgroups that multiply."""
        return 1 if self.weights == 64 else 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage of the ring."""
        return 2 * INNER_STEP * (self.weights + self.rows)

    def stages(self, num_experts: int) -> int:
        """The largest number of stages that fit beside the plan."""
        plan = _PLAN_BYTES * expert_limit(num_experts) + _BARRIER_BYTES
        taken = -(-plan // _ALIGNMENT) * _ALIGNMENT
        return min(16, (_SHARED_BYTES - taken) // self.stage_bytes)


@dataclass(frozen=True, slots=True)
class TritonCut:
    """Tile shape of Triton's grouped product: a program computes ``rows`` x ``columns`` of
    the output, over the inner dimension in steps of ``step``.
    """

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


Cut = GroupedShape | TritonCut


def expert_limit(num_experts: int) -> int:
    """The number of experts that the kernel for at least this many is built for."""
    return next(limit for limit in EXPERT_LIMITS if num_experts <= limit)


class GroupedTable:
    """Measured choices for one device: for each stack of weights, the best tile shape by total
    rows.

    `derived_shape` serves stacks that were not measured, and rows above the last entry. A file
    maps ``experts x outputs x inner kind`` to a list of ``[most rows, cut]``. Rows are tokens
    times experts of a token; a cut is null where no measured tile shape was faster than the
    rule's kernel, else the numbers of a `GroupedShape` or those of a `TritonCut`.
    ``benchmarks/tune_experts.py`` writes the file.
    """

    def __init__(self, entries: dict[str, list[tuple[int, list[int] | None]]]) -> None:
        self._bounds: dict[str, list[int]] = {}
        self._choices: dict[str, list[Cut | None]] = {}
        for name, steps in entries.items():
            self._bounds[name] = [most for most, _ in steps]
            self._choices[name] = [_cut_of(cut) for _, cut in steps]

    @classmethod
    def of_device(cls, name: str) -> GroupedTable:
        """The table of a GPU by its name; an empty table if the GPU was not measured."""
        return cls(cls.shipped(name))

    @staticmethod
    def shipped(name: str) -> dict[str, list[tuple[int, list[int] | None]]]:
        """The entries that the package has for a GPU."""
        return shipped_entries(name, "_experts")

    def check(self) -> None:
        """Raise ValueError unless all entries are valid: rising row counts, and tile shapes
        that a kernel supports."""
        for name, bounds in self._bounds.items():
            check_bounds(name, bounds)
            for cut in self._choices[name]:
                if isinstance(cut, GroupedShape):
                    cut.check(int(name.partition("x")[0]))

    def has(self, rows: int, shape: tuple[int, int, int], kind: GroupedKind) -> bool:
        """Whether weights of this shape [experts, outputs, inner] were measured with as many
        rows."""
        bounds = self._bounds.get(stack_name(shape, kind))
        return bounds is not None and rows <= bounds[-1]

    def pick(self, rows: int, shape: tuple[int, int, int], kind: GroupedKind) -> Cut | None:
        """The measured choice for weights of this shape [experts, outputs, inner]; None is that
        of the rule, and of weights that were not measured."""
        name = stack_name(shape, kind)
        bounds = self._bounds.get(name)
        if bounds is None or rows > bounds[-1]:
            return None
        return self._choices[name][bisect_left(bounds, rows)]

    def pair(
        self, rows: int, gate_up: tuple[int, int, int], *, has_own: bool
    ) -> tuple[Cut | None, Cut | None]:
        """The tile shapes of the gated and of the plain product of experts whose ``gate_up`` is
        [experts, outputs, hidden]: those measured, or with ``has_own`` those of the rule for
        our kernel. None: Triton's default.
        """
        num_experts, outputs, hidden = gate_up
        if self.has(rows, gate_up, "gated"):
            plain = self.pick(rows, (num_experts, hidden, outputs // 2), "plain")
            found = self.pick(rows, gate_up, "gated"), plain
            if found != (None, None):
                return found
        is_whole = not (hidden % INNER_MULTIPLE or outputs // 2 % INNER_MULTIPLE)
        if not has_own or not is_whole or num_experts > EXPERT_LIMITS[-1]:
            return None, None
        cut = derived_shape(rows, num_experts)
        return cut, cut

    def kernels(self, hidden_size: int) -> list[tuple[GroupedShape, GroupedKind, int]]:
        """Our kernel's tile shapes for weights that read or write ``hidden_size``, the
        widest first, with kind and number of experts.
        """
        found = set()
        for name, choices in self._choices.items():
            sizes, _, kind = name.partition(" ")
            experts, outputs, inner = map(int, sizes.split("x"))
            if hidden_size in (outputs, inner):
                cuts = (cut for cut in choices if isinstance(cut, GroupedShape))
                found |= {(cut, cast(GroupedKind, kind), experts) for cut in cuts}
        return sorted(found, key=lambda each: -each[0].rows)


_DERIVED = (
    (8, GroupedShape(256, 16)), (16, GroupedShape(256, 32)), (32, GroupedShape(256, 64)),
    (64, GroupedShape(256, 96)), (128, GroupedShape(256, 192)),
)  # fmt: skip
_DERIVED_SHARED = GroupedShape(256, 192, 2)
_FEW_ROWS = 3
"""Rows of an expert up to which Triton's kernels are as fast."""


def derived_shape(num_rows: int, num_experts: int) -> GroupedShape | None:
    """The tile shape of both products of experts without measurements; None: Triton's.

    The tile holds an expert's average rows and half as many more, so that most experts have
    one run. From 4 rows of an expert on, such tiles were the fastest on an H200 for Mixtral
    8x7B, and for 128 experts of 768 by 2,048 these or the next smaller ones.
    """
    average = -(-num_rows // num_experts)
    if average <= _FEW_ROWS:
        return None
    return next((shape for most, shape in _DERIVED if average <= most), _DERIVED_SHARED)


def derived_shapes() -> list[GroupedShape]:
    """All that `derived_shape` returns, the slowest to compile first."""
    return [_DERIVED_SHARED, *(shape for _, shape in reversed(_DERIVED))]


def _cut_of(numbers: list[int] | None) -> Cut | None:
    if numbers is None:
        return None
    if len(numbers) == len(fields(TritonCut)):
        return TritonCut(*numbers)
    return GroupedShape(*numbers)


def stack_name(shape: tuple[int, int, int], kind: GroupedKind) -> str:
    """The table's key for weights of this shape [experts, outputs, inner]."""
    experts, outputs, inner = shape
    return f"{experts}x{outputs}x{inner} {kind}"
