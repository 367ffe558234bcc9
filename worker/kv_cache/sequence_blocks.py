"""One sequence's blocks, what it may begin with, and how long its content is kept."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.host_pool import BlockHash

Transfer = tuple[int, int, int]
"""KV group, and of a move to the host a block and a slot, of a load a slot and a block."""


class RetentionPlan(NamedTuple):
    """How long each block of one request is kept, by the place of its first token."""

    ranges: tuple[tuple[int, int, Retention], ...]
    """First token, end (exclusive), and what holds between."""

    output: Retention = Retention()
    """For what is generated."""

    num_prompt_tokens: int = 0

    def at(self, token: int) -> Retention:
        """What holds for the block that begins with this token."""
        if token >= self.num_prompt_tokens:
            return self.output
        for first, end, retention in self.ranges:
            if first <= token < end:
                return retention
        return Retention()


def root_hash(cache_salt: bytes, adapter_id: int) -> BlockHash:
    """The parent of a sequence's first block: content is shared only under equal roots."""
    return blake2b(cache_salt, digest_size=16, key=adapter_id.to_bytes(8, "little")).digest()


def hash_of(parent: BlockHash, token_ids: array[int]) -> BlockHash:
    """A block's hash, by what is before it and its own ids."""
    return blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


class SequenceBlocks:
    """One sequence's blocks: a block table a KV group, and the hashes of its full blocks."""

    __slots__ = (
        "hashes", "is_long", "load", "max_blocks", "num_left", "num_published", "retention",
        "root", "tables",
    )  # fmt: skip

    def __init__(self, num_groups: int, root: BlockHash) -> None:
        self.root = root
        self.is_long = False
        """Whether its keys are rotated as those of long sequences are; see
        `KVCacheManager.fit_to`."""
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.num_published = 0
        self.max_blocks = 0
        """Blocks that a group reserved for it to hold at once; 0 means none."""
        self.num_left = 0
        """Blocks behind the sinks that are in the tables, but held no more: no query sees
        them again."""
        self.retention: RetentionPlan | None = None
        self.load: list[Transfer] = []
        """Copies from the host that are under way."""

    @property
    def num_blocks(self) -> int:
        """Blocks in each table."""
        return len(self.tables[0])

    def parent_of(self, index: int) -> BlockHash:
        """The hash of what stands before a block."""
        return self.hashes[index - 1] if index else self.root

    @property
    def num_held(self) -> int:
        """Of these, those that are still held."""
        return self.num_blocks - self.num_left


class Prefix(NamedTuple):
    """Blocks, a list a group, that hold the first tokens of a sequence about to start."""

    shared: list[list[int]]
    last: list[int]
    """A block, one a group, that is begun with but not shared, as it will be written: that
    of the last token where the prefix covers all (it is computed again), or one that holds
    the first few tokens of a block."""

    num_last: int = 0
    """Tokens of ``last`` that need not be computed."""

    keeps_last: bool = False
    """``last`` is copied although unreferenced: it holds more tokens than the prefix needs."""

    stored: Sequence[list[int]] = ()
    """Slots of the host that hold what follows, if any group has a host pool."""

    num_left: int = 0
    """Blocks behind the sinks that need not be held: no query will see them."""

    is_under_way: bool = False
    """What follows is just being copied from the host for another sequence."""

    @property
    def num_stored(self) -> int:
        """Blocks of each group to be copied from the host, or left out."""
        return len(self.stored[0]) if self.stored else 0

    def num_cached(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return (len(self.shared[0]) + self.num_stored) * block_size + self.num_last
