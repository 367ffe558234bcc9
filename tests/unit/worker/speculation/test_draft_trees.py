"""Trees of drafts: their nodes and masks, and how many nodes a step verifies."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.draft_tree import (
    MC_SIM_7B_63,
    DraftTree,
    DynamicTree,
    DynamicTreeLimits,
    accepted_path,
    read_choices,
    tree_of,
)
from trimaran.worker.config.speculation_config import SpeculationConfig
from trimaran.worker.execution.dynamic_trees import Candidates, likeliest_nodes, tree_words
from trimaran.worker.speculation.controller import DraftController
from trimaran.worker.speculation.tree_rates import NodeRates, TreeRates


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
        (", ".join(f"{{{n % 64}, {n // 64}}}" for n in range(65)), "has 65 nodes"),
        ("{" + "0, " * 20_000 + "0}", "has 20001 nodes"),
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
    assert str(caught.value).startswith(f"eagle_choices is {text[:1000]!r}"[:1000])


def test_a_dynamic_tree_has_the_masks_and_the_first_path_of_its_parents():
    rng = random.Random(5)
    for _ in range(20):
        tree = random_tree(rng)
        dynamic = DynamicTree(list(tree.parents))
        ids = array("i", range(tree.num_nodes))
        assert tuple(dynamic.masks) == tree.masks
        assert dynamic.chain_of(ids) == tree.chain_of(ids)
        words = tree_words(torch.tensor([tree.parents, tree.parents]), tree.depth)
        assert words.tolist() == [list(tree.masks)] * 2
        for node in range(-1, tree.num_nodes):
            count = rng.randrange(node + 1, tree.num_nodes + 1)
            assert dynamic.first_child(node, count) == tree.first_child(node, count)


def test_the_likeliest_nodes_are_a_tree_whose_nodes_follow_their_parents():
    rng = random.Random(6)
    for _ in range(50):
        parents, scores = [], []
        for number in range(40):
            parents.append(rng.randrange(-1, number))
            above = scores[parents[-1]] if parents[-1] >= 0 else 0.0
            # Probabilities of 1 and of 0 make equal scores.
            scores.append(above + rng.choice([0.0, -1.0, -rng.random(), float("-inf")]))
        found = Candidates([], [], [])
        for first, end in ((0, 15), (15, 40)):
            part = slice(first, end)
            found.add(
                torch.arange(100 + first, 100 + end)[None],
                torch.tensor([scores[part]]),
                torch.tensor([parents[part]]),
            )
        ids, above = likeliest_nodes(found, 12)
        chosen = [each - 100 for each in ids[0].tolist()]
        assert [scores[each] for each in chosen] == sorted(scores, reverse=True)[:12]
        for place, (each, parent) in enumerate(zip(chosen, above[0].tolist(), strict=True)):
            assert parent < place
            assert parents[each] == (chosen[parent] if parent >= 0 else -1)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"drafter": "medusa"},
            "is medusa, which grows no trees, but a dynamic tree with top-",
        ),
        ({"tree": ((0,),)}, "top-k 4 is set together with choices of 1 nodes. Leave one out"),
        ({"tree_depth": 0}, "has top-k 4 and depth 0, but both must be 1 to 64"),
        ({"tree_width": 65}, "has top-k 65 and depth 3, but both must be 1 to 64"),
        ({"tree_depth": 17}, "expands 64 nodes, but a mask covers 63. Lower the top-k"),
        ({"max_draft_tokens": 65}, "--max-draft-tokens is 65 but must be 1 to 64"),
    ],
)
def test_trees_that_cannot_grow_are_refused(fields, complaint):
    values = {
        "drafter": "eagle", "draft_dir": "/x", "max_draft_tokens": 16, "tree_width": 4,
        "tree_depth": 3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=complaint):
        SpeculationConfig(**{**values, **fields})


def test_a_dynamic_tree_has_no_more_nodes_than_candidates():
    config = SpeculationConfig(
        drafter="eagle", draft_dir="/x", max_draft_tokens=60, tree_width=3, tree_depth=3
    )
    assert (config.max_draft_tokens, config.dynamic_limits) == (21, DynamicTreeLimits(3, 3, 21))
    # No more nodes of a depth are expanded than the tree has.
    wide = SpeculationConfig(
        drafter="eagle", draft_dir="/x", max_draft_tokens=5, tree_width=60, tree_depth=5
    )
    assert wide.dynamic_limits == DynamicTreeLimits(5, 5, 5)


def config_of(most, **values):
    return SpeculationConfig(drafter="eagle", draft_dir="/x", max_draft_tokens=most, **values)


def test_a_network_drafts_some_numbers_of_first_nodes():
    assert config_of(5).drafted_counts == [1, 2, 3, 4, 5]
    chosen = config_of(64, tree=MC_SIM_7B_63)
    assert chosen.drafted_counts == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 63]
    # A tree of more nodes than its width and depth takes as many passes as the largest one.
    dynamic = config_of(20, tree_width=3, tree_depth=4)
    assert dynamic.drafted_counts == [1, 2, 3, 20]
    assert dynamic.dynamic_limits.first(2) == DynamicTreeLimits(2, 2, 2)
    assert dynamic.dynamic_limits.first(20) == dynamic.dynamic_limits
    beams = SpeculationConfig(
        drafter="redrafter", draft_dir="/x", max_draft_tokens=20, tree_width=4, tree_depth=5
    )
    assert beams.drafted_counts == [20]


def test_the_first_nodes_of_a_tree_may_be_a_chain():
    assert tree_of([[0], [0, 0], [1], [0, 0, 0]]).chain_length == 2
    assert tree_of([[1], [0], [0, 0]]).chain_length == 0
    assert tree_of([[0], [0, 0], [0, 0, 1]]).chain_length == 2


def test_the_rate_of_a_node_is_that_of_its_number():
    rates = NodeRates(6)
    rng = random.Random(7)
    for _ in range(3000):
        path = [0, 2] if rng.random() < 0.6 else [1] if rng.random() < 0.5 else []
        rates.observe(4, path)
    shape = rates.shape
    assert shape.shares[:4] == pytest.approx([1.0, 0.33, 1.0, 0.0], abs=0.1)
    assert shape.depths.tolist() == [1] * 6


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


def test_a_node_that_adds_little_is_verified_for_better_ones_behind_it():
    tree = tree_of([[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    rates = TreeRates(tree)
    for _ in range(500):
        rates.observe(5, [0, 2, 3, 4])
    # The second node is never right, and each of the others adds 0.4 tokens or more.
    assert choices_of(rates, 1, tree, 0.1) == 5
    few = tree_of([[0], [1], [2], [3]])
    rates = TreeRates(few)
    for _ in range(500):
        rates.observe(4, [0])
    assert choices_of(rates, 1, few, 0.1) == 1
