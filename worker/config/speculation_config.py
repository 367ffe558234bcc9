"""Configuration of speculative decoding; free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.draft_network import DRAFT_MODEL, EAGLE, MTP, NETWORKS, REDRAFTER
from trimaran.worker.config.draft_tree import (
    Choices,
    DraftTree,
    DynamicTreeLimits,
    beam_limits,
    dynamic_limits,
    tree_of,
)

LOOKAHEAD = "lookahead"
DRAFTERS = ("none", "draft_tokens", "ngram", LOOKAHEAD, *NETWORKS)
"""Values of ``--speculative-decoding``."""

MAX_DRAFT_TOKENS = 64
"""Most draft tokens that a step may verify for one sequence."""

_MAX_DRAFTED = 16
"""Sequences whose drafts always have rows in a step."""

MAX_ROWS = 512
"""Rows up to which a step has rows for the drafts of all sequences. On an H200 the products of
an 8B model take 5.7 ms for 256 rows and 9.2 ms for 384: with more rows than these, few drafts
are worth their time."""


_DRAFTED = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48)
"""Numbers of drafts that a network makes of a sequence, beside the largest one."""


class LookaheadSizes(NamedTuple):
    """The sizes of lookahead decoding, with the defaults of TensorRT-LLM's documents."""

    window: int = 7
    """Most guesses behind the output that a step computes."""

    ngram: int = 7
    """Ids of an n-gram, 2 or more."""

    verification_set: int = 7
    """N-grams that are kept for one first id, the latest."""


_DEFAULT_SIZES = LookaheadSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Which draft tokens an engine verifies, and how many."""

    drafter: str = "none"
    """``none``; ``draft_tokens``: the tokens that requests bring; ``ngram``: these, and for
    other requests the tokens behind an earlier occurrence of the last tokens;
    ``lookahead``: these, and n-grams that the model makes beside the output; ``eagle``,
    ``medusa``, ``redrafter``, ``mtp``, ``draft_model``: these, and for other requests the
    tokens of a network."""

    lookahead: LookaheadSizes = _DEFAULT_SIZES
    """The largest sizes of requests for ``lookahead``, and their defaults."""

    draft_dir: str = ""
    """The folder of the network that drafts."""

    max_draft_tokens: int = 5
    """Most draft tokens of a sequence in a step; with a ``tree``, its nodes."""

    tree: Choices = ()
    """The tree that a network drafts, each node behind its parent; empty for a chain."""

    tree_width: int = 0
    """Nodes that a network expands at each depth of a dynamic tree, whose likeliest
    ``max_draft_tokens`` nodes are verified, or beams of ``redrafter``; 0 for neither."""

    tree_depth: int = 0
    """Tokens of a longest path through a dynamic tree."""

    is_adaptive: bool = True
    """Whether drafts that no request brought are verified only where that is expected to save
    time."""

    is_overlapped: bool = True
    """Whether steps with a network's drafts are planned before the result of the last step."""

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ConfigError(
                f"--speculative-decoding is {self.drafter!r} but must be one of "
                f"{', '.join(DRAFTERS)}"
            )
        object.__setattr__(self, "lookahead", LookaheadSizes(*self.lookahead))
        if min(self.lookahead) < 1 or self.lookahead.ngram < 2:
            raise ConfigError(
                "lookahead_window_size, lookahead_ngram_size and "
                f"lookahead_verification_set_size are {', '.join(map(str, self.lookahead))} "
                "but must be 1 or more, and the second 2 or more."
            )
        if self.is_network != bool(self.draft_dir):
            needed = "needs the" if self.is_network else "takes no"
            raise ConfigError(
                f"--speculative-decoding {self.drafter} {needed} folder of a network that "
                f"drafts, but --draft-model is {self.draft_dir or 'not set'}."
            )
        object.__setattr__(self, "tree", tuple(map(tuple, self.tree)))
        if self.tree:
            self._check_tree()
        if not 1 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                f"--max-draft-tokens is {self.max_draft_tokens} but must be 1 to "
                f"{MAX_DRAFT_TOKENS}. For no drafts leave out --speculative-decoding."
            )
        if self.tree_width or self.tree_depth:
            self._check_dynamic_tree()

    def _check_tree(self) -> None:
        if not self.is_network or self.drafter in (REDRAFTER, MTP):
            raise ConfigError(
                f"--speculative-decoding is {self.drafter}, which drafts chains, but a tree of "
                f"{len(self.tree)} nodes is set. Leave the tree out."
            )
        if len(self.tree) > self.max_draft_tokens:
            raise ConfigError(
                f"the tree of drafts has {len(self.tree)} nodes but at most "
                f"{self.max_draft_tokens} draft tokens are verified in a step. Raise "
                "--max_draft_len or --max-draft-tokens, or name fewer choices."
            )
        assert tree_of(self.tree).choices == self.tree, "a node stands before its parent"
        object.__setattr__(self, "max_draft_tokens", len(self.tree))

    def _check_dynamic_tree(self) -> None:
        """Refuse dynamic trees that no network can grow."""
        if self.drafter not in (EAGLE, DRAFT_MODEL, REDRAFTER):
            raise ConfigError(
                f"--speculative-decoding is {self.drafter}, which grows no trees, but a "
                f"dynamic tree with top-k {self.tree_width} is set. Leave the tree out."
            )
        if self.tree:
            raise ConfigError(
                f"a dynamic tree with top-k {self.tree_width} is set together with choices of "
                f"{len(self.tree)} nodes. Leave one out."
            )
        make = beam_limits if self.drafter == REDRAFTER else dynamic_limits
        limits = make(self.tree_width, self.tree_depth, self.max_draft_tokens)
        object.__setattr__(self, "max_draft_tokens", limits.num_nodes)

    @property
    def draft_tree(self) -> DraftTree | None:
        """The tree that a network drafts; None for chains and for dynamic trees."""
        return DraftTree(self.tree) if self.tree else None

    @property
    def dynamic_limits(self) -> DynamicTreeLimits | None:
        """The limits of the dynamic trees that a network grows; None for other drafts."""
        if not self.tree_width:
            return None
        make = beam_limits if self.drafter == REDRAFTER else dynamic_limits
        return make(self.tree_width, self.tree_depth, self.max_draft_tokens)

    @property
    def has_trees(self) -> bool:
        """Whether a network's drafts are trees."""
        return bool(self.tree or self.tree_width)

    @property
    def drafted_counts(self) -> list[int]:
        """Numbers of drafts that a network makes of a sequence; the last is the largest. For
        another number the next larger one is made, without the last drafts. For trees these
        are first nodes."""
        most, limits = self.max_draft_tokens, self.dynamic_limits
        least_whole = most
        if limits is not None:
            # More nodes take the passes of a whole tree, and a search all of its beams.
            widest = 1 if limits.is_of_beams else max(limits.width, limits.depth)
            least_whole = min(most, widest)
        return [*(count for count in _DRAFTED if count < least_whole), most]

    @property
    def is_on(self) -> bool:
        """Whether any draft tokens are verified."""
        return self.drafter != "none"

    @property
    def is_network(self) -> bool:
        """Whether a network in the ranks drafts."""
        return self.drafter in NETWORKS

    @property
    def lookahead_sizes(self) -> tuple[int, ...]:
        """The largest sizes of lookahead decoding; empty for another drafter."""
        return tuple(self.lookahead) if self.drafter == LOOKAHEAD else ()

    @property
    def max_per_request(self) -> int:
        """Most draft tokens that a request may bring."""
        return self.max_draft_tokens if self.is_on else 0

    def num_rows(self, max_num_seqs: int, max_num_tokens: int) -> int:
        """Most decode rows of a step, those that verify draft tokens included.

        Every sequence has a row of its own. The first sequences may have draft rows beside.
        """
        if not self.is_on:
            return max_num_seqs
        of_each = 1 + self.max_draft_tokens
        # A tree is verified in part where rows are short.
        least = 0 if self.has_trees else _MAX_DRAFTED * of_each
        wanted = min(max_num_seqs * of_each, max(MAX_ROWS, least))
        return min(max_num_tokens, max(max_num_seqs, wanted))
