"""Drafts in trees: outputs are those without drafts, and accepted paths are those of a plain
walk."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.unit.worker.conftest import VOCAB
from tests.unit.worker.speculation.head_reference import random_eagle
from tests.unit.worker.speculation.test_exactness import WAYS, check, draw, serve
from tests.unit.worker.speculation.test_networks import (
    EXAMPLES,
    count_with,
    drafts_by,
    make_engine,
)
from tests.unit.worker.speculation.tree_reference import (
    EagleDynamic,
    EagleTree,
    Growing,
    MedusaTree,
    RedrafterBeams,
    generate_by_tree,
)
from trimaran.worker.config.draft_tree import MC_SIM_7B_63, DraftTree, tree_of
from trimaran.worker.config.speculation_config import SpeculationConfig

SMALL = tree_of([[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0, 0]])


def tree_by(kind, folders, tree, **fields):
    """The configuration of one kind of network that drafts a tree."""
    values = {"max_draft_tokens": 64, "is_adaptive": False, **fields}
    return SpeculationConfig(
        drafter=kind, draft_dir=str(folders[kind]), tree=tree.choices, **values
    )


def dynamic_by(kind, folders, growing, **fields):
    """The configuration of one kind of network that grows trees."""
    return SpeculationConfig(
        drafter=kind, draft_dir=str(folders[kind]), max_draft_tokens=len(growing.choices),
        tree_width=growing.width, tree_depth=growing.depth, is_adaptive=False, **fields,
    )  # fmt: skip


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("kind", ["draft_model", "medusa", "eagle"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "a window"])
def test_trees_of_networks_change_no_output(target_folder, networks, kind, way):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(target_folder, SpeculationConfig(), **WAYS[way]), asked)

    driver = make_engine(target_folder, tree_by(kind, networks, SMALL), **WAYS[way])
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert counts.num_tokens
    assert counts.num_accepted or kind == "eagle"  # whose weights are random


def test_medusa_trees_are_drafted_and_verified_as_the_plain_loop_does(
    target, target_folder, networks
):
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 7)]
    tree = DraftTree(MC_SIM_7B_63)
    head = MedusaTree(networks["medusa"])
    told = [generate_by_tree(target, head, prompt, 40, tree) for prompt in prompts]

    driver = make_engine(target_folder, tree_by("medusa", networks, tree))
    outputs, counts = count_with(driver, prompts, 40)

    assert outputs == [ids for ids, _ in told]
    assert (counts.num_drafts, counts.num_accepted) == (
        sum(each.drafts for _, each in told),
        sum(each.accepted for _, each in told),
    )
    assert counts.num_accepted
    # One stage moves its own entries: moves for other stages would pile up.
    assert driver.engine.scheduler.draft_rows.path_moves is None


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 16}, {"tokens_per_block": 4, "max_tokens": 160}],
)
def test_eagle_trees_are_drafted_and_verified_as_the_plain_loop_does(
    target, target_folder, tmp_path, changes
):
    folder = random_eagle(tmp_path / "head", target.config, draft_vocab=VOCAB, scale=0.2)
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 7)]
    head = EagleTree(folder, target, (2, 3, 3))
    told = [generate_by_tree(target, head, prompt, 40, SMALL) for prompt in prompts]

    driver = make_engine(target_folder, tree_by("eagle", {"eagle": folder}, SMALL), **changes)
    outputs, counts = count_with(driver, prompts, 40)

    assert outputs == [ids for ids, _ in told]
    assert (counts.num_drafts, counts.num_accepted) == (
        sum(each.drafts for _, each in told),
        sum(each.accepted for _, each in told),
    )
    assert counts.num_accepted


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("kind", ["draft_model", "eagle", "redrafter"])
@pytest.mark.parametrize("way", [way for way in WAYS if way != "a window"])
def test_dynamic_trees_change_no_output(target_folder, networks, kind, way):
    rng = random.Random(way)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(target_folder, SpeculationConfig(), **WAYS[way]), asked)

    config = dynamic_by(kind, networks, Growing(3, 4, 12))
    driver = make_engine(target_folder, config, **WAYS[way])
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert counts.num_tokens
    assert counts.num_accepted or kind != "draft_model"  # of others weights are random


@pytest.mark.parametrize("most", [48, 30])
def test_beams_are_those_of_the_plain_loop(target, target_folder, networks, most):
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 7)]
    head = RedrafterBeams(networks["redrafter"], target)
    # All nodes of many beams of three tokens, or the first ones: weights are random.
    head.growing = Growing(16, 3, most)
    told = [generate_by_tree(target, head, prompt, 40, head.growing) for prompt in prompts]

    config = dynamic_by("redrafter", networks, head.growing)
    outputs, counts = count_with(make_engine(target_folder, config), prompts, 40)

    assert outputs == [ids for ids, _ in told]
    accepted = sum(each.accepted for _, each in told)
    assert counts.num_accepted == pytest.approx(accepted, rel=0.02)
    assert counts.num_accepted


@pytest.mark.matrix(keep=2)
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 16}, {"tokens_per_block": 4, "max_tokens": 240}],
)
def test_dynamic_trees_are_those_of_the_plain_loop(target, target_folder, tmp_path, changes):
    folder = random_eagle(tmp_path / "head", target.config, draft_vocab=VOCAB, scale=0.2)
    prompts = [[place % VOCAB for place in range(n, 3 * n + 9, 2)] for n in (1, 4, 7)]
    growing = Growing(4, 3, 10)
    head = EagleDynamic(folder, target, (2, 3, 3))
    head.growing = growing
    told = [generate_by_tree(target, head, prompt, 40, growing) for prompt in prompts]

    config = dynamic_by("eagle", {"eagle": folder}, growing)
    driver = make_engine(target_folder, config, **changes)
    outputs, counts = count_with(driver, prompts, 40)

    assert outputs == [ids for ids, _ in told]
    # Two paths of nearly the same probability may change places.
    assert counts.num_drafts == pytest.approx(sum(each.drafts for _, each in told), rel=0.02)
    accepted = sum(each.accepted for _, each in told)
    assert counts.num_accepted == pytest.approx(accepted, rel=0.02)
    assert counts.num_accepted


@pytest.mark.parametrize("count", [1, 2, 4, 7])
@pytest.mark.parametrize("form", ["chosen", "chain first", "dynamic"])
def test_a_request_for_few_nodes_gets_the_first_ones_of_the_plain_loop(form, count):
    base, folder = EXAMPLES / "demo_models" / "base", EXAMPLES / "draft_heads" / "eagle"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompt = Tokenizer.from_file(str(base / "tokenizer.json")).encode("The king said to").ids
    whole = SMALL if form == "chosen" else tree_of([[0, 0, 0, 0], [1], [0, 1], [1, 0], [2]])
    few, head = whole.first(count), EagleTree(folder, model, (2, 4, 5))
    if form == "dynamic":
        whole, few = Growing(4, 4, 9), Growing(4, 4, count)
        head = EagleDynamic(folder, model, (2, 4, 5))
        head.growing = whole
    output, told = generate_by_tree(model, head, prompt, 40, few)

    make = dynamic_by if form == "dynamic" else tree_by
    driver = make_engine(base, make("eagle", {"eagle": folder}, whole))
    asked = driver.submit(prompt, max_tokens=40, top_k=1, max_draft_tokens=count)
    driver.run(max_steps=100_000)

    assert driver.output(asked) == output
    counts = driver.engine.scheduler.draft_counts
    assert counts.num_accepted == pytest.approx(told.accepted, rel=0.02)
    assert counts.num_accepted


def test_dynamic_trees_of_the_shipped_head_accept_what_the_plain_loop_accepts():
    base, folder = EXAMPLES / "demo_models" / "base", EXAMPLES / "draft_heads" / "eagle"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    prompt = Tokenizer.from_file(str(base / "tokenizer.json")).encode("The king said to").ids
    head = EagleDynamic(folder, model, (2, 4, 5))
    head.growing = Growing(4, 4, 9)
    output, told = generate_by_tree(model, head, prompt, 60, head.growing)

    config = dynamic_by("eagle", {"eagle": folder}, head.growing)
    outputs, counts = count_with(make_engine(base, config), [prompt], 60)

    assert outputs == [output]
    assert counts.num_accepted == pytest.approx(told.accepted, rel=0.02)
    # Static trees of as many nodes accept less.
    static = make_engine(base, tree_by("eagle", {"eagle": folder}, SMALL))
    outputs, without = count_with(static, [prompt], 60)
    assert outputs == [output]
    assert counts.num_accepted / counts.num_drafts > without.num_accepted / without.num_drafts


def test_trees_of_the_shipped_head_are_longer_than_chains():
    base, folder = EXAMPLES / "demo_models" / "base", EXAMPLES / "draft_heads" / "eagle"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    prompts = [tokenizer.encode("Once upon a time there was").ids]
    told = [
        generate_by_tree(model, EagleTree(folder, model, (2, 4, 5)), prompt, 40, SMALL)
        for prompt in prompts
    ]

    driver = make_engine(base, tree_by("eagle", {"eagle": folder}, SMALL))
    outputs, counts = count_with(driver, prompts, 40)

    assert outputs == [ids for ids, _ in told]
    assert counts.num_accepted == sum(each.accepted for _, each in told)
    chains = drafts_by("eagle", {"eagle": folder}, max_draft_tokens=4)
    _, without = count_with(make_engine(base, chains), prompts, 40)
    # Accepted tokens of a verification.
    assert counts.num_accepted / counts.num_drafts > without.num_accepted / without.num_drafts


def test_a_target_that_drafts_trees_for_itself_is_right_to_the_last_level(target_folder):
    """Reused blocks, pauses and moved entries leave the network's cache whole."""
    own = {"draft_model": target_folder}
    driver = make_engine(
        target_folder, tree_by("draft_model", own, SMALL), tokens_per_block=4, max_tokens=480,
        max_num_batched_tokens=80, depth=2,
    )  # fmt: skip
    rng = random.Random(6)
    start = [rng.randrange(VOCAB) for _ in range(24)]
    for number in range(16):
        driver.submit([*start[: number % 25], number], max_tokens=50, top_k=1)
        driver.step()
    driver.run(max_steps=100_000)
    driver.check_idle()

    scheduler = driver.engine.scheduler
    counts = scheduler.draft_counts
    assert scheduler.cache.num_reused_blocks
    # Whole trees are accepted to the depth of their first path.
    depth = len(SMALL.first_path)
    shorter = counts.num_drafts * depth - counts.num_accepted
    assert counts.accepted_at[0] == counts.num_drafts
    assert shorter < counts.num_drafts


class Oracle:
    """Proposes trees for sequences whose outputs are known: the right ids on a random path, to
    a random depth, and wrong ids elsewhere, some of them twice among siblings."""

    is_asked = False
    is_spent = False

    def __init__(self, output, tree, rng):
        self._output, self._tree, self._rng = output, tree, rng
        self.wanted = 0

    def propose(self, sequence, most):
        count = min(most, self._tree.num_nodes)
        done = sequence.num_output_tokens
        ids = [self._rng.choice([7, 8, 9]) for _ in range(count)]
        at, depth = -1, self._rng.randrange(5)
        while depth and done < len(self._output):
            children = self._tree.children(at, count)
            if not children:
                break
            at = self._rng.choice(children)
            ids[at] = self._output[done]
            done, depth = done + 1, depth - 1
        return array("i", ids)


@pytest.mark.matrix(keep=3)
@pytest.mark.parametrize("shape", ["small", "medusa", "wide", "chain"])
@pytest.mark.parametrize("way", ["together", "paused", "few rows"])
def test_right_and_wrong_trees_change_no_output(target_folder, way, shape):
    trees = {
        "small": SMALL,
        "medusa": DraftTree(MC_SIM_7B_63),
        "wide": tree_of([[rank] for rank in range(64)]),
        "chain": tree_of([[0] * 12]),
    }
    tree, rng = trees[shape], random.Random(shape + way)
    asked = [draw(rng) for _ in range(40)]
    expected = serve(make_engine(target_folder, SpeculationConfig(), **WAYS[way]), asked)
    outputs = {number: each for number, (each, *_) in enumerate(expected, 1)}

    # The target drafts too: its drafts are not used.
    own = tree_by("draft_model", {"draft_model": target_folder}, tree)
    driver = make_engine(target_folder, own, **WAYS[way])
    rows = driver.engine.scheduler.draft_rows
    rows.make_drafter = lambda request: Oracle(
        (outputs[request.request_id] or [[]])[0], tree, rng
    )
    check(serve(driver, asked), expected)

    counts = driver.engine.scheduler.draft_counts
    assert 0 < counts.num_accepted < counts.num_tokens
