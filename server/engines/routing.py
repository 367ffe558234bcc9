"""Which worker group of a model takes a request: who owes least, who knows the prompt."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_KNOWN_BLOCKS = 1 << 16
"""Most blocks of prompts that are remembered a group; about 10 MiB."""

KNOWN_TOKEN_WORTH = 4.0
MAX_IMBALANCE = 1.25

_ID_BYTES = 4
_FORGETTING = 0.99


def block_hashes(prompt_ids: bytes, tokens_per_block: int, root: object) -> list[int]:
    """One number for each full block, which stands for it and all before it.

    Two prompts of one ``root`` have as many equal numbers as equal blocks from the start.
    """
    size = tokens_per_block * _ID_BYTES
    last = hash(root)
    hashes = []
    for end in range(size, len(prompt_ids) + 1, size):
        last = hash((last, prompt_ids[end - size : end]))
        hashes.append(last)
    return hashes


class KnownPrefixes:
    """The blocks that a group has seen and may still hold, the latest ones.

    A wrong guess costs time, never a token: the engine looks for itself.
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
        """Note a prompt. Its end is forgotten before its beginning, as engines evict."""
        blocks = self._blocks
        for each in reversed(hashes):
            blocks[each] = None
            blocks.move_to_end(each)
        while len(blocks) > self._max_blocks:
            blocks.popitem(last=False)


@dataclass(slots=True, eq=False)
class GroupLoad:
    """What one group has still to compute, in tokens."""

    context_tokens: int = 0
    """Of prompts whose first token has not come, but for what is cached."""

    output_tokens: int = 0
    """That running requests may still ask for."""

    prefixes: KnownPrefixes | None = None
    """None if the engine keeps nothing of a prompt, or nobody asks."""

    last_chosen: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as routing sees it."""

    num_tokens: int
    max_tokens: int = 0
    """Most tokens of its output."""

    hashes: Sequence[int] = ()
    """Of its blocks (`block_hashes`); none if nobody asks."""

    tokens_per_block: int = 32

    def num_known(self, load: GroupLoad) -> int:
        """Tokens from the start that the group need not compute; one is always computed."""
        if load.prefixes is None:
            return 0
        known = load.prefixes.count(self.hashes) * self.tokens_per_block
        return min(known, self.num_tokens - 1)


class Router:
    """Chooses the group that owes least, or one that knows the prompt's beginning.

    Computing a beginning again is work for nothing, while uneven groups only do the same
    work at other times: a known token makes up for `KNOWN_TOKEN_WORTH` owed ones. But a
    group that owes over `MAX_IMBALANCE` times what the least loaded one does, and this
    request besides, is not preferred. Equals take turns.

    Requests end before they reach their limit more or less often: what one may still ask
    for counts by the share that finished ones used of theirs.
    """

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._asked = 0.0
        self._used = 0.0

    @property
    def used_share(self) -> float:
        """Output tokens that finished requests had, as a share of those they asked for."""
        return self._used / self._asked if self._asked else 1.0

    def finished(self, max_tokens: int, num_tokens: int) -> None:
        """Learn from a request that came to its end."""
        self._asked = self._asked * _FORGETTING + max_tokens
        self._used = self._used * _FORGETTING + num_tokens

    def choose(self, loads: Sequence[GroupLoad], prompt: Prompt) -> int:
        """The index of the group for this request; there is at least one."""
        share = self.used_share
        owed = [load.context_tokens + share * load.output_tokens for load in loads]
        own = prompt.num_tokens + share * prompt.max_tokens
        limit = MAX_IMBALANCE * min(owed) + own
        costs = [
            (owed[i] - KNOWN_TOKEN_WORTH * prompt.num_known(load), load.last_chosen, i)
            for i, load in enumerate(loads)
            if owed[i] <= limit
        ]
        chosen = min(costs)[-1]
        loads[chosen].last_chosen = next(self._turns)
        return chosen
