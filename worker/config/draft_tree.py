"""Trees of drafts: which draft follows which, and how their rows see each other. No torch."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from trimaran.comm.errors import ConfigError

Choices = tuple[tuple[int, ...], ...]
"""Nodes of a tree. A node is the path to it: the rank, from 0 on, of each token on the path
among the likeliest tokens behind the token before."""

MAX_NODES = 64
"""Most nodes: a node's mask is a word of 64 bits, its own bit included."""

_MAX_RANK = 63
_MAX_SHOWN = 1000
"""Characters of a tree that errors show."""

_NUMBERS = re.compile(r"[\[({]([\s\d,]*)[\])}]")

MC_SIM_7B_63: Choices = tuple(
    tuple(int(rank) for rank in path)
    for path in (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 "
        "12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 "
        "050 15 101 021 90 060 0001 16 070"
    ).split()
)
"""The tree of Medusa's authors for heads of Vicuna 7B: its nodes by falling acceptance."""


@dataclass(frozen=True)
class DraftTree:
    """A tree whose nodes are numbered so that each follows its parent.

    The first nodes of a tree therefore are a tree too, which is how steps verify less. A chain
    is the tree in which each node's parent is the node before.
    """

    choices: Choices

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The number of each node's parent; -1 for the token that the target chose."""
        numbers = {path: number for number, path in enumerate(self.choices)}
        return tuple(numbers.get(path[:-1], -1) for path in self.choices)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each node from the token that the target chose, from 1 on."""
        return tuple(map(len, self.choices))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each node among the likeliest tokens behind its parent."""
        return tuple(path[-1] for path in self.choices)

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """A signed word of 64 bits for each node: bit i says whether the node's row sees the
        row i places before its own. Rows before the tree are all seen."""
        return tuple(_words_of(self.parents))

    @cached_property
    def first_path(self) -> tuple[int, ...]:
        """The nodes of the likeliest chain: each is the first child of the one before."""
        path: list[int] = []
        for number, parent in enumerate(self.parents):
            if parent == (path[-1] if path else -1):
                path.append(number)
        return tuple(path)

    @cached_property
    def _children(self) -> dict[int, tuple[int, ...]]:
        """By node, -1 for the root, its children."""
        found: dict[int, tuple[int, ...]] = {}
        for number, parent in enumerate(self.parents):
            found[parent] = (*found.get(parent, ()), number)
        return found

    def children(self, node: int, count: int) -> tuple[int, ...]:
        """The children of a node, -1 for the root, among the first ``count`` nodes."""
        children = self._children.get(node, ())
        if children and children[-1] >= count:
            return tuple(each for each in children if each < count)
        return children

    def first_child(self, node: int, count: int) -> int | None:
        """The first child of a node among the first ``count`` nodes; None without children."""
        children = self._children.get(node)
        return children[0] if children and children[0] < count else None

    def chain_of(self, ids: array[int]) -> array[int]:
        """The ids of `first_path` among those of the first nodes."""
        return array("i", [ids[node] for node in self.first_path if node < len(ids)])

    @property
    def num_nodes(self) -> int:
        """Nodes, without the token that the target chose."""
        return len(self.choices)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(self.depths)

    @property
    def text(self) -> str:
        """The tree in the form that `read_choices` reads."""
        return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in self.choices)

    @cached_property
    def chain_length(self) -> int:
        """So many first nodes are the likeliest chain, each behind the node before."""
        count = 0
        while count < len(self.choices) and self.choices[count] == (0,) * (count + 1):
            count += 1
        return count

    def first(self, count: int) -> DraftTree:
        """The tree of the first ``count`` nodes."""
        return DraftTree(self.choices[:count])


class DynamicTreeLimits(NamedTuple):
    """The limits of trees that a network grows for each sequence anew, by the probabilities of
    the tokens: the dynamic trees of EAGLE-2, and the beams of ReDrafter."""

    width: int
    """Nodes that are expanded at each depth, and the children of each."""

    depth: int
    """Tokens of a longest path."""

    num_nodes: int
    """Nodes of a tree, the likeliest."""

    is_of_beams: bool = False
    """Whether the paths are the beams of a search, by a network without a cache."""

    @property
    def num_slots(self) -> int:
        """Most slots behind the known ids that a network's cache takes while a tree grows."""
        return 0 if self.is_of_beams else self.width * (self.depth - 1) + 1

    def first(self, count: int) -> DynamicTreeLimits:
        """The limits within which the likeliest ``count`` nodes are found, which are those of
        the whole tree: no further nodes of a depth are among them."""
        if count >= self.num_nodes:
            return self
        width, depth = min(self.width, count), min(self.depth, count)
        return self._replace(width=width, depth=depth, num_nodes=count)

    @property
    def num_candidates(self) -> int:
        """Nodes from which those of a tree are chosen."""
        if self.is_of_beams:
            return self.width * self.depth
        return self.width * (1 + self.width * (self.depth - 1))


def beam_limits(width: int, depth: int, num_nodes: int) -> DynamicTreeLimits:
    """The limits of trees of ``width`` beams of ``depth`` tokens, whose first ``num_nodes``
    nodes are verified.

    Raises:
        ConfigError: a number is out of range, or all beams have too many nodes.
    """
    if not (width >= 1 and depth >= 1 and width * depth <= MAX_NODES):
        raise ConfigError(
            f"{width} beams of {depth} tokens are drafted, but both numbers must be 1 or more, "
            f"and their product at most {MAX_NODES}. Lower the beams (--redrafter_num_beams) "
            "or their length (--redrafter_draft_len_per_beam)."
        )
    return DynamicTreeLimits(width, depth, min(num_nodes, width * depth), is_of_beams=True)


def dynamic_limits(width: int, depth: int, num_nodes: int) -> DynamicTreeLimits:
    """The limits of trees of at most ``num_nodes`` nodes.

    Raises:
        ConfigError: a number is out of range, or a mask covers too few of the expanded nodes.
    """
    if not (1 <= width <= MAX_NODES and 1 <= depth <= MAX_NODES):
        raise ConfigError(
            f"the dynamic tree of drafts has top-k {width} and depth {depth}, but both must be "
            f"1 to {MAX_NODES}."
        )
    # No more nodes of one depth can be among the likeliest of all.
    limits = DynamicTreeLimits(min(width, num_nodes), depth, num_nodes)
    if limits.num_slots > MAX_NODES:
        raise ConfigError(
            f"the dynamic tree of drafts has top-k {width} and depth {depth}, and expands "
            f"{limits.num_slots - 1} nodes, but a mask covers {MAX_NODES - 1}. Lower the top-k "
            "(--eagle_dynamic_tree_max_top_k) or the depth (--num_eagle_layers)."
        )
    return limits._replace(num_nodes=min(num_nodes, limits.num_candidates))


class DynamicTree:
    """The tree that a network grew for one sequence, by the parent of each node.

    Without ``parents`` ranks alone know the tree.
    """

    __slots__ = ("parents",)

    def __init__(self, parents: List[int] = ()) -> None:
        """``parents``: of each node, -1 for the root; a node follows its parent."""
        self.parents = parents

    @property
    def masks(self) -> List[int]:
        """See `DraftTree.masks`."""
        return _words_of(self.parents)

    def first_child(self, node: int, count: int) -> int | None:
        """See `DraftTree.first_child`."""
        children = (n for n in range(node + 1, count) if self.parents[n] == node)
        return next(children, None)

    def chain_of(self, ids: array[int]) -> array[int]:
        """The ids of the chain in which each node is the first child of the one before."""
        chain, at = array("i"), self.first_child(-1, len(ids))
        while at is not None:
            chain.append(ids[at])
            at = self.first_child(at, len(ids))
        return chain


AnyTree = DraftTree | DynamicTree

UNKNOWN_MASK = 0
"""In place of a node's mask: ranks have the mask of their own tree. No mask is 0."""


def _words_of(parents: List[int]) -> list[int]:
    """See `DraftTree.masks`."""
    found: list[int] = []
    for number, parent in enumerate(parents):
        word = 1 | -2 << number
        if parent >= 0:
            word = 1 | found[parent] << (number - parent)
        word &= (1 << MAX_NODES) - 1
        found.append(word - (1 << MAX_NODES) if word >> (MAX_NODES - 1) else word)
    return found


def accepted_path(
    parents: List[int] | None, drafts: List[int], own: List[int], *, by_depth: bool = False
) -> list[int]:
    """The nodes that are accepted, from the root on.

    ``parents`` None means a chain. ``own[0]`` is the token that the target chose in place of a
    first draft, and ``own[1 + n]`` the token behind node n. With ``by_depth`` ``own`` is the
    output instead: the token of each depth.
    """
    path: list[int] = []
    at = -1
    for number, draft in enumerate(drafts):
        parent = number - 1 if parents is None else parents[number]
        if parent != at:
            continue
        place = len(path) if by_depth else at + 1
        if place < len(own) and draft == own[place]:
            path.append(number)
            at = number
    return path


def row_masks(tree: AnyTree | None, count: int) -> List[int]:
    """`DraftTree.masks` of the first ``count`` nodes, or of a chain for None; `UNKNOWN_MASK` if
    ranks alone know the tree."""
    if tree is None:
        return [-1] * count
    return tree.masks[:count] if tree.parents else [UNKNOWN_MASK] * count


def tree_of(choices: List[List[int]]) -> DraftTree:
    """The tree of these nodes, in their order, each behind its parent. Nodes on the way to a
    node belong to the tree without being named.

    Raises:
        ConfigError: a node is empty, named twice or out of range, or there are too many.
    """
    # Before work that grows with the square of either number.
    if len(choices) > MAX_NODES or any(len(choice) > MAX_NODES for choice in choices):
        most = max(len(choices), *map(len, choices))
        raise ConfigError(
            f"the tree of drafts has {most} nodes but must have 1 to {MAX_NODES}. Name "
            "fewer choices."
        )
    paths = [tuple(choice) for choice in choices]
    for path in paths:
        if not path or not all(0 <= rank <= _MAX_RANK for rank in path):
            raise ConfigError(
                f"the tree of drafts has the node {list(path)}, but a node is a list of ranks "
                f"from 0 to {_MAX_RANK}. Correct the choices."
            )
        if paths.count(path) > 1:
            raise ConfigError(
                f"the tree of drafts has the node {list(path)} twice. Leave one out."
            )
    found: dict[tuple[int, ...], None] = {}
    for path in paths:
        found.update(dict.fromkeys(path[:end] for end in range(1, len(path) + 1)))
    if not 1 <= len(found) <= MAX_NODES:
        raise ConfigError(
            f"the tree of drafts has {len(found)} nodes but must have 1 to {MAX_NODES}. Name "
            "fewer choices."
        )
    return DraftTree(tuple(found))


def read_choices(text: str, name: str) -> Choices:
    """The tree of a parameter in the form ``{0, 0, 0}, {0, 1}``, with any kind of brackets.

    Raises:
        ConfigError: ``text``, the value of ``name``, has another form or is no tree.
    """
    inner = text.strip()
    if re.match(r"[\[({]\s*[\[({]", inner):
        inner = inner[1:-1]
    parts = _NUMBERS.findall(inner)
    rest = re.sub(r"[\s,]", "", _NUMBERS.sub("", inner))
    try:
        choices = [[int(rank) for rank in part.split(",")] for part in parts]
    except ValueError:
        choices = []
    shown = repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
    if rest or not choices:
        raise ConfigError(
            f"{name} is {shown} but must be a tree such as '{{0}}, {{0, 0}}, {{1}}': the rank "
            "of each token on the way to a node."
        )
    try:
        return tree_of(choices).choices
    except ConfigError as error:
        raise ConfigError(f"{name} is {shown}: {error}") from None
