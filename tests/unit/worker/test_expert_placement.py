"""Where experts are, and where they should be for what they have to do."""

from __future__ import annotations

import numpy as np
import pytest

from trimaran.worker.expert_placement import EMPTY, Placement


def check(placement: Placement) -> None:
    """Every expert is somewhere, and nowhere twice at one part."""
    assert (placement.num_copies() >= 1).all()
    for part in placement.experts:
        held = part[part != EMPTY]
        assert len(set(held.tolist())) == len(held)


def applied(old: Placement, new: Placement) -> np.ndarray:
    """What is at each place once the moves are made, all at once."""
    now = old.experts.copy()
    for move in old.moves_to(new):
        now[move.to_part, move.to_place] = old.experts[move.from_part, move.from_place]
    return np.where(new.experts == EMPTY, EMPTY, now)


def test_experts_begin_in_their_order_and_redundant_places_empty():
    placement = Placement.initial(4, 2, 2)

    assert placement.experts.tolist() == [[0, 1, EMPTY], [2, 3, EMPTY]]
    assert placement.places().tolist() == [[0, 0], [1, 1], [3, 3], [4, 4]]
    assert placement.loads(np.array([1, 2, 3, 4])).tolist() == [3, 7]


def test_hot_experts_are_parted():
    placement = Placement.initial(4, 2)
    tokens = np.array([10, 10, 1, 1])

    new = placement.balanced(tokens)

    assert placement.imbalance(tokens) == pytest.approx(20 / 11)
    assert new.imbalance(tokens) == 1.0
    # One pair changes places; the others stay where they are.
    assert len(placement.moves_to(new)) == 2


def test_a_redundant_place_takes_a_copy_of_the_busiest_expert():
    placement = Placement.initial(4, 2, 2)
    tokens = np.array([100, 1, 1, 0])

    new = placement.balanced(tokens)

    assert new.num_copies()[0] == 2
    assert sorted(np.argwhere(new.experts == 0)[:, 0].tolist()) == [0, 1]
    assert new.imbalance(tokens) < 1.02 < placement.imbalance(tokens)


def test_a_layer_without_load_stays_as_it_is():
    placement = Placement.initial(8, 4, 4)

    assert not placement.moves_to(placement.balanced(np.zeros(8, dtype=np.int64)))


@pytest.mark.parametrize("seed", range(30))
def test_any_loads_are_placed_and_reached_by_moves(seed):
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
        assert new.imbalance(tokens) <= placement.imbalance(tokens)
        assert new.balanced(tokens) is new
        placement = new
