"""Trees of drafts: their nodes and masks, and how many nodes a step verifies."""

from __future__ import annotations

import random

import pytest

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.draft_tree import (
    MC_SIM_7B_63,
    DraftTree,
    accepted_path,
    read_choices,
    tree_of,
)
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.speculation.controller import DraftController
from trimaran.worker.speculation.tree_rates import TreeRates


def test_the_default_tree_is_that_of_63_nodes_and_four_heads():
    tree = DraftTree(MC_SIM_7B_63)

    assert (tree.num_nodes, tree.depth, max(tree.ranks)) == (63, 4, 9)
    assert tree_of(tree.choices) == tree
    assert read_choices(tree.text, "medusa_choices") == tree.choices


def random_tree(rng):
    paths = [()]
    while len(paths) < rng.randrange(2, 66):
        path = (*rng.choice(paths), rng.randrange(4))
        if path not in paths:
            paths.append(path)
    return tree_of(paths[1:])


def test_a_node_sees_its_ancestors_and_the_rows_before_the_tree():
    rng = random.Random(1)
    for _ in range(50):
        tree = random_tree(rng)
        for number, (parent, word) in enumerate(zip(tree.parents, tree.masks, strict=True)):
            assert parent < number
            seen = {number - bit for bit in range(64) if word >> bit & 1}
            ancestors = {number}
            while parent >= 0:
                ancestors.add(parent)
                parent = tree.parents[parent]
            assert {node for node in seen if node >= 0} == ancestors
            assert {node for node in seen if node < 0} == set(range(number - 63, 0))
            assert len(ancestors) == tree.depths[number]


def test_the_accepted_path_of_a_chain_is_its_equal_beginning():
    rng = random.Random(2)
    for _ in range(200):
        drafts = [rng.randrange(2) for _ in range(rng.randrange(7))]
        own = [rng.randrange(2) for _ in range(len(drafts) + 1)]
        same = next((n for n, draft in enumerate(drafts) if draft != own[n]), len(drafts))
        assert accepted_path(None, drafts, own) == list(range(same))
        chain = [-1, 0, 1, 2, 3, 4, 5]
        assert accepted_path(chain, drafts, own) == list(range(same))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "but must be a tree such as"),
        ("{0}, {a}", "but must be a tree such as"),
        ("{0}, {1}, {0}", "has the node [0] twice"),
        ("{64}", "a node is a list of ranks from 0 to 63"),
        (
            ", ".join(f"{{0, {rank}}}" for rank in range(64)),
            "has 65 nodes but must have 1 to 64",
        ),
    ],
)
def test_what_is_no_tree_is_refused_with_its_value(text, complaint):
    with pytest.raises(ConfigError) as caught:
        read_choices(text, "eagle_choices")

    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"eagle_choices is {text!r}")


@pytest.mark.parametrize("drafter", ["ngram", "redrafter", "mtp"])
def test_drafters_of_chains_take_no_tree(drafter):
    folder = "" if drafter == "ngram" else "/x"
    with pytest.raises(ConfigError, match=f"{drafter}, which drafts chains"):
        SpeculationConfig(drafter=drafter, draft_dir=folder, tree=((0,),))


def choices_of(rates, rows, tree, slope):
    """The nodes that one sequence verifies, if a row beyond ``rows`` takes ``slope`` of a
    step's time."""
    controller = DraftController()
    for count in (1, *range(1, 65)):
        seconds = 1.0 + slope * max(0, count - rows)
        for _ in range(3):
            controller.record(count, seconds, is_drafted=count > 1)
            controller.record(1, 1.0, is_drafted=False)
            controller.record(1, 1.0, is_drafted=False)
    return controller.choose(1, [0.8], [tree.num_nodes], 63, rates.shape)[0]


def test_a_step_verifies_the_nodes_that_are_worth_their_rows():
    tree = DraftTree(MC_SIM_7B_63)
    rates = TreeRates(tree)
    rng = random.Random(4)
    for _ in range(2000):
        # Rank 0 is right in 70 %, rank 1 in 15 %, rank 2 in 5 % of the cases.
        path, at = [], -1
        while True:
            draw = rng.random()
            rank = 0 if draw < 0.7 else 1 if draw < 0.85 else 2 if draw < 0.9 else 99
            children = tree.children(at, 63)
            found = [child for child in children if tree.ranks[child] == rank]
            if not found:
                break
            at = found[0]
            path.append(at)
        rates.observe(63, path)
    shares = rates.shape.shares
    assert shares[tree.choices.index((0,))] == 1.0
    assert shares[tree.choices.index((1,))] == pytest.approx(0.15 / 0.7, rel=0.3)
    assert shares[tree.choices.index((2,))] == pytest.approx(0.05 / 0.7, rel=0.5)

    free, dear = choices_of(rates, 64, tree, 0.0), choices_of(rates, 4, tree, 0.2)
    assert free > 40
    assert 1 <= dear < 12
    assert choices_of(rates, 1, tree, 2.0) == 0
