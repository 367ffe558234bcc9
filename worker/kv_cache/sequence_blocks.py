"""One sequence's blocks, its prefix, and the retention of its content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from trimaran.worker.kv_cache.free_blocks import Retention
from trimaran.worker.kv_cache.host_pool import BlockHash

Transfer = tuple[int, int, int]
"""KV group, then block and slot for a copy to the host, or slot and block for a load."""


class RetentionPlan(NamedTuple):
    """Retention of each block of a request, by the position of the block's first token."""

    ranges: tuple[tuple[int, int, Retention], ...]
    """First token, end (exclusive), and the retention of blocks in between."""

    output: Retention = Retention()
    """Retention of generated tokens."""

    num_prompt_tokens: int = 0

    def at(self, token: int) -> Retention:
        """Retention of the block that begins with this token."""
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
    """A block's hash, from its parent's hash and its own ids."""
    return blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


class SequenceBlocks:
    """One sequence's blocks: a block table a KV group, and the hashes of its full blocks."""

    __slots__ = (
        "hashes",
        "is_long",
        "load",
        "max_blocks",
        "num_prompt",
        "num_published",
        "num_skipped",
        "retention",
        "root",
        "tables",
    )  # fmt: skip

    def __init__(self, num_groups: int, root: BlockHash) -> None:
        self.root = root
        self.is_long = False
        """Whether its keys have the rotation of long sequences; see
        `KVCacheManager.separate_long_contexts`."""
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.hashes: list[BlockHash] = []
        self.num_prompt = -1
        """Tokens of the prompt, if blocks with output have other hashes than blocks of a prompt
        with the same ids; else -1."""
        self.num_published = 0
        self.max_blocks = 0
        """Blocks a group that the sequence has reserved to hold at once; 0 means none."""
        self.num_skipped = 0
        """Blocks after the sinks that are in the tables but no longer referenced, because they
        left the window."""
        self.retention: RetentionPlan | None = None
        self.load: list[Transfer] = []
        """Copies from the host that are in flight."""

    @property
    def num_blocks(self) -> int:
        """Blocks in each table."""
        return len(self.tables[0])

    def parent_of(self, index: int) -> BlockHash:
        """The hash of the block before ``index``."""
        return self.hashes[index - 1] if index else self.root

    def hash_at(self, index: int, token_ids: array[int], block_size: int) -> BlockHash:
        """The hash of block ``index``, which has these ids."""
        parent = self.parent_of(index)
        if index == self.num_prompt // block_size:
            # No token has the id -1.
            parent = hash_of(parent, array("i", [-1, self.num_prompt % block_size]))
        return hash_of(parent, token_ids)

    def prompt_part(self, index: int, block_size: int) -> int:
        """Tokens of the prompt in block ``index``; 0 if blocks with output have no hashes of
        their own."""
        return max(0, min(block_size, self.num_prompt - index * block_size))

    @property
    def num_held(self) -> int:
        """Blocks in each table that are still referenced."""
        return self.num_blocks - self.num_skipped


class Prefix(NamedTuple):
    """Cached blocks, a list a group, that hold the first tokens of a sequence about to
    start."""

    shared: list[list[int]]
    last: list[int]
    """A block, one a group, that must be copied rather than shared, because the sequence
    writes it: the block of the last token if the prefix covers all tokens (the last token is
    computed again), or a block of which only the first tokens match."""

    num_last: int = 0
    """Tokens of ``last`` that need not be computed."""

    keeps_last: bool = False
    """Whether ``last`` is copied although unreferenced: its other tokens stay cached."""

    stored: Sequence[list[int]] = ()
    """Host slots with the content that follows, if any group has a host pool."""

    num_skipped: int = 0
    """Blocks after the sinks that are not taken, because they are outside of the window."""

    is_under_way: bool = False
    """Whether the following content is being loaded from the host for another sequence."""

    @property
    def num_stored(self) -> int:
        """Blocks of each group that are loaded from the host, or outside of the window."""
        return len(self.stored[0]) if self.stored else 0

    def num_cached(self, block_size: int) -> int:
        """Cached tokens of the prefix."""
        return (len(self.shared[0]) + self.num_stored) * block_size + self.num_last
