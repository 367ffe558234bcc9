"""Routing of requests to worker groups: by load and by cached prefix."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_KNOWN_BLOCKS = 1 << 16
"""Most prompt blocks that are recorded for each group; about 10 MiB."""

KNOWN_TOKEN_WORTH = 4.0
MAX_IMBALANCE = 1.25

_ID_BYTES = 4
_FORGETTING = 0.99


def block_hashes(prompt_ids: bytes, tokens_per_block: int, root: object) -> list[int]:
    """One hash for each full block, over that block and all blocks before it.

    Two prompts with one ``root`` share as many hashes as they share leading blocks.
    """
    size = tokens_per_block * _ID_BYTES
    last = hash(root)
    hashes = []
    for end in range(size, len(prompt_ids) + 1, size):
        last = hash((last, prompt_ids[end - size : end]))
        hashes.append(last)
    return hashes


class KnownPrefixes:
    """The latest blocks that a group has computed and may still have cached.

    A wrong guess costs time only: the engine looks up its own prefix cache.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = min(max_blocks, MAX_KNOWN_BLOCKS)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, hashes: Iterable[int]) -> int:
        """Blocks from the start that are known."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, hashes))

    def add(self, hashes: Sequence[int]) -> None:
        """Record a prompt. Its last blocks are dropped first, as engines evict them."""
        blocks = self._blocks
        for each in reversed(hashes):
            blocks[each] = None
            blocks.move_to_end(each)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class GroupLoad:
    """The outstanding work of one group, in tokens."""

    context_tokens: int = 0
    """Uncached prompt tokens of requests whose prefill is not complete."""

    output_tokens: int = 0
    """Output tokens that running requests may still produce."""

    prefixes: KnownPrefixes | None = None
    """None without a prefix cache, or if routing does not use it."""

    last_chosen: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as routing sees it."""

    num_tokens: int
    max_tokens: int = 0
    """Most tokens of its output."""

    hashes: Sequence[int] = ()
    """Hashes of its blocks (`block_hashes`); empty if routing does not use them."""

    tokens_per_block: int = 32

    def num_known(self, load: GroupLoad) -> int:
        """Leading tokens that the group may have cached; the last token never counts."""
        if load.prefixes is None:
            return 0
        known = load.prefixes.count(self.hashes) * self.tokens_per_block
        return min(known, self.num_tokens - 1)


class Router:
    """Chooses the least loaded group, or a group that has the prompt's prefix cached.

    Recomputing a prefix wastes work, while uneven load only delays it: a cached token
    outweighs `KNOWN_TOKEN_WORTH` outstanding tokens. A group is not considered if its load
    exceeds `MAX_IMBALANCE` times the lowest load plus this request. Equal groups take turns.

    Many requests end before their limit. Outstanding output tokens are therefore weighted
    by the share of the limit that finished requests used.
    """

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._asked = 0.0
        self._used = 0.0

    @property
    def used_fraction(self) -> float:
        """Output tokens of finished requests as a share of their limits."""
        return self._used / self._asked if self._asked else 1.0

    def finished(self, max_tokens: int, num_tokens: int) -> None:
        """Update the share with a finished request."""
        self._asked = self._asked * _FORGETTING + max_tokens
        self._used = self._used * _FORGETTING + num_tokens

    def choose(self, loads: Sequence[GroupLoad], prompt: Prompt) -> int:
        """The index of the group for this request; there is at least one."""
        fraction = self.used_fraction
        outstanding = [load.context_tokens + fraction * load.output_tokens for load in loads]
        own = prompt.num_tokens + fraction * prompt.max_tokens
        limit = MAX_IMBALANCE * min(outstanding) + own
        costs = [
            (outstanding[i] - KNOWN_TOKEN_WORTH * prompt.num_known(load), load.last_chosen, i)
            for i, load in enumerate(loads)
            if outstanding[i] <= limit
        ]
        chosen = min(costs)[-1]
        loads[chosen].last_chosen = next(self._turns)
        return chosen
