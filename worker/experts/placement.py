"""The placement of experts in the slots of ranks, and a better placement for given loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

# Shapes: X experts of a layer, P parts of the ranks, K slots of a part.

EMPTY = -1

_WORTH = 0.95
"""Experts move if the imbalance falls below this fraction of the current imbalance."""

_ROUNDING = 1e-9
"""Imbalances that differ by less are equal: rounding of the same loads in another order."""


class Move(NamedTuple):
    """A copy of an expert's matrices from one slot to another."""

    from_part: int
    from_slot: int
    to_part: int
    to_slot: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The expert in each slot of each part; slots may be empty, experts may have several
    copies.

    Slots are numbered part after part, as the routing kernel numbers them.
    """

    experts: IntArray
    """[P, K]; `EMPTY` for a slot without an expert."""

    num_experts: int

    @classmethod
    def initial(cls, num_experts: int, num_parts: int, num_redundant: int = 0) -> Placement:
        """Each expert once, in order, as ranks load them; redundant slots are empty.

        Both numbers are multiples of ``num_parts``.
        """
        own = np.arange(num_experts, dtype=np.int64).reshape(num_parts, -1)
        empty = np.full((num_parts, num_redundant // num_parts), EMPTY, dtype=np.int64)
        return cls(np.concatenate([own, empty], axis=1), num_experts)

    def num_copies(self) -> IntArray:
        """Copies of each expert, [X]."""
        held = self.experts[self.experts != EMPTY]
        return np.bincount(held, minlength=self.num_experts)

    def slots(self) -> IntArray:
        """Slots of each expert, [X, P]; unused entries repeat the first slot."""
        num_parts = self.experts.shape[0]
        slots = np.zeros((self.num_experts, num_parts), dtype=np.int64)
        for expert in range(self.num_experts):
            found = np.flatnonzero(self.experts.ravel() == expert)
            slots[expert] = found[0]
            slots[expert, : len(found)] = found
        return slots

    def loads(self, tokens_X: IntArray) -> FloatArray:
        """Load of each part, [P], with each expert's tokens divided evenly over its copies."""
        shares_X = tokens_X / self.num_copies()
        padded = np.append(shares_X, 0.0)
        loads: FloatArray = padded[self.experts].sum(axis=1)
        return loads

    def imbalance(self, tokens_X: IntArray) -> float:
        """The busiest part's load divided by the average; 1 without any load."""
        loads_P = self.loads(tokens_X)
        mean = float(loads_P.mean())
        return float(loads_P.max()) / mean if mean else 1.0

    def balanced(self, tokens_X: IntArray) -> Placement:
        """A placement for these loads; this one unless the other saves some 5 % of the busiest
        part's load. Deterministic, so ranks with the same loads agree.

        Each further copy goes to the expert with the most tokens a copy, at most one copy a
        part. Copies are assigned, the busiest first, to the least loaded part with a free slot.
        An expert that stays at a part keeps its slot. Then empty slots are filled, also for
        even loads, unless that raises the busiest part's load.
        """
        if not tokens_X.any():
            return self
        num_parts, num_slots = self.experts.shape
        copies_X = _copies(tokens_X, num_parts, num_parts * num_slots)
        parts = _spread(tokens_X / copies_X, copies_X, num_parts, num_slots)
        new = Placement(_keep_slots(self.experts, parts), self.num_experts)
        is_worth = new.imbalance(tokens_X) < _WORTH * self.imbalance(tokens_X)
        best = new if is_worth else self
        filled = best
        while (more := filled._with_another_copy(tokens_X)) is not None:
            filled = more
        is_worse = filled.imbalance(tokens_X) > best.imbalance(tokens_X) + _ROUNDING
        return best if is_worse else filled

    def _with_another_copy(self, tokens_X: IntArray) -> Placement | None:
        """This placement with one more filled slot: at the least loaded part with an empty
        slot, the expert of another part with the most tokens a copy. None if no part has
        room."""
        is_empty_PK = self.experts == EMPTY
        num_held_P = (~is_empty_PK).sum(axis=1)
        has_room_P = is_empty_PK.any(axis=1) & (num_held_P < self.num_experts)
        if not has_room_P.any():
            return None
        part = int(np.where(has_room_P, self.loads(tokens_X), np.inf).argmin())
        shares_X = tokens_X / self.num_copies()
        shares_X[self.experts[part, ~is_empty_PK[part]]] = -1.0
        experts = self.experts.copy()
        experts[part, is_empty_PK[part].argmax()] = shares_X.argmax()
        return Placement(experts, self.num_experts)

    def moves_to(self, other: Placement) -> list[Move]:
        """The copies that turn this placement into the other; sources are slots of this one.

        The copies of an expert that several parts hold are read from these parts in turn.
        """
        moves = []
        for part, slot in np.argwhere(other.experts != self.experts).tolist():
            expert = other.experts[part, slot]
            if expert == EMPTY:
                continue
            sources = np.argwhere(self.experts == expert)
            from_part, from_slot = sources[(part + slot) % len(sources)].tolist()
            moves.append(Move(from_part, from_slot, part, slot))
        return moves


def _copies(tokens_X: IntArray, num_parts: int, num_slots: int) -> IntArray:
    copies = np.ones(len(tokens_X), dtype=np.int64)
    for _ in range(num_slots - len(tokens_X)):
        loads = np.where(copies < num_parts, tokens_X / copies, 0.0)
        busiest = int(loads.argmax())
        if loads[busiest] <= 0:
            break
        copies[busiest] += 1
    return copies


def _spread(
    shares_X: FloatArray, copies_X: IntArray, num_parts: int, num_slots: int
) -> list[list[int]]:
    """Experts of each part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = np.zeros(num_parts)
    # First copies first, because every expert needs a slot.
    order = np.argsort(-shares_X, kind="stable").tolist()
    for expert in order:
        for copy in range(int(copies_X[expert])):
            left = num_parts * num_slots - sum(map(len, parts))
            needed = len(shares_X) - len(set().union(*parts))
            if copy and left <= needed:
                break
            fits = [
                part
                for part in range(num_parts)
                if len(parts[part]) < num_slots and expert not in parts[part]
            ]
            if not fits:
                break
            part = min(fits, key=lambda part: loads[part])
            parts[part].append(expert)
            loads[part] += shares_X[expert]
    return parts


def _keep_slots(now_PK: IntArray, parts: list[list[int]]) -> IntArray:
    """The same parts, assigned and ordered so that as few experts as possible move."""
    num_parts, _ = now_PK.shape
    wanted = [set(part) for part in parts]
    overlaps = [
        (-len(wanted[number].intersection(now_PK[part].tolist())), part, number)
        for part in range(num_parts)
        for number in range(num_parts)
    ]
    new_PK = np.full_like(now_PK, EMPTY)
    named: dict[int, int] = {}
    for _, part, number in sorted(overlaps):
        if part in named or number in named.values():
            continue
        named[part] = number
        stays = np.isin(now_PK[part], parts[number])
        new_PK[part, stays] = now_PK[part, stays]
        arriving = sorted(wanted[number].difference(now_PK[part].tolist()))
        free = np.flatnonzero(new_PK[part] == EMPTY)[: len(arriving)]
        new_PK[part, free] = arriving
    return new_PK
