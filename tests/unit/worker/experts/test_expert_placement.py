"""The placement of experts, and the placement that their loads call for."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.worker.experts.placement import EMPTY, Placement


def check(placement: Placement) -> None:
    """Every expert has a slot, and no two at one part."""
    assert (placement.num_copies() >= 1).all()
    for part in placement.experts:
        held = part[part != EMPTY]
        assert len(set(held.tolist())) == len(held)


def applied(old: Placement, new: Placement) -> np.ndarray:
    """The expert in each slot after all moves, made at once."""
    now = old.experts.copy()
    for move in old.moves_to(new):
        now[move.to_part, move.to_slot] = old.experts[move.from_part, move.from_slot]
    return np.where(new.experts == EMPTY, EMPTY, now)


def test_experts_start_in_order_with_empty_redundant_slots():
    placement = Placement.initial(4, 2, 2)

    assert placement.experts.tolist() == [[0, 1, EMPTY], [2, 3, EMPTY]]
    assert placement.slots().tolist() == [[0, 0], [1, 1], [3, 3], [4, 4]]
    assert placement.loads(np.array([1, 2, 3, 4])).tolist() == [3, 7]


def test_hot_experts_move_to_different_ranks():
    placement = Placement.initial(4, 2)
    tokens = np.array([10, 10, 1, 1])

    new = placement.balanced(tokens)

    assert placement.imbalance(tokens) == pytest.approx(20 / 11)
    assert new.imbalance(tokens) == 1.0
    # One pair of experts is exchanged; the other experts stay in their slots.
    assert len(placement.moves_to(new)) == 2


def test_a_redundant_slot_takes_a_copy_of_the_busiest_expert():
    placement = Placement.initial(4, 2, 2)
    tokens = np.array([100, 1, 1, 0])

    new = placement.balanced(tokens)

    assert new.num_copies()[0] == 2
    assert sorted(np.argwhere(new.experts == 0)[:, 0].tolist()) == [0, 1]
    assert new.imbalance(tokens) < 1.02 < placement.imbalance(tokens)


def test_a_layer_without_load_keeps_its_placement():
    placement = Placement.initial(8, 4, 4)

    assert not placement.moves_to(placement.balanced(np.zeros(8, dtype=np.int64)))


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize(
    "loads",
    [
        lambda draw: np.full(8, 100),
        lambda draw: draw.integers(990, 1010, 8),
        lambda draw: (draw.pareto(1.0, 8) * 100).astype(np.int64) + 1,
        # Some experts that no token chose yet.
        lambda draw: draw.permutation([7, 0, 0, 3, 1, 0, 0, 5]),
        lambda draw: draw.permutation([1, 1, 0, 0, 0, 0, 0, 0]),
    ],
    ids=["even", "nearly even", "uneven", "with gaps", "one token"],
)
def test_with_a_slot_for_every_expert_every_part_holds_all_experts(num_parts, loads):
    tokens = loads(np.random.default_rng(num_parts))
    placement = Placement.initial(8, num_parts, 8 * (num_parts - 1))

    new = placement.balanced(tokens)

    assert [sorted(part) for part in new.experts.tolist()] == [list(range(8))] * num_parts
    assert len(placement.moves_to(new)) >= 8 * (num_parts - 1)
    assert new.imbalance(tokens) == pytest.approx(1.0)
    # Afterwards no expert moves.
    assert new.balanced(tokens[::-1].copy()) is new


def test_balanced_loads_fill_empty_slots_and_move_no_expert():
    placement = Placement.initial(8, 2, 4)

    new = placement.balanced(np.full(8, 50))

    assert new.experts[:, :4].tolist() == placement.experts[:, :4].tolist()
    assert EMPTY not in new.experts
    assert len(placement.moves_to(new)) == 4


def test_slots_stay_empty_if_copies_would_raise_the_busiest_parts_load():
    placement = Placement.initial(4, 2, 2)
    # Equal sums of a large and a small load, or of two equal loads: copies would unbalance the
    # parts.
    tokens = np.array([20, 1, 11, 10])

    assert placement.imbalance(tokens) == 1.0
    assert placement.balanced(tokens) is placement


@pytest.mark.parametrize("seed", range(30))
def test_random_loads_get_a_valid_placement_that_moves_reach(seed):
    draw = np.random.default_rng(seed)
    num_parts = int(draw.choice([2, 3, 4, 8]))
    num_experts = num_parts * int(draw.integers(1, 9))
    redundant = num_parts * int(draw.integers(0, 4))
    placement = Placement.initial(num_experts, num_parts, redundant)
    for _ in range(4):
        tokens = (draw.pareto(1.0, num_experts) * 100).astype(np.int64)
        new = placement.balanced(tokens)

        check(new)
        assert applied(placement, new).tolist() == new.experts.tolist()
        assert new.imbalance(tokens) <= placement.imbalance(tokens) + 1e-9
        assert new.balanced(tokens) is new
        placement = new
