"""Content of sequences that made room for others, which nobody else may use."""

from __future__ import annotations

from collections.abc import Sequence

from trimaran.worker.kv_cache.block_pool import BlockPool
from trimaran.worker.kv_cache.host_pool import BlockHash
from trimaran.worker.kv_cache.sequence_blocks import SequenceBlocks


class OwnContent:
    """Names blocks where contents have no hashes, and forgets them when their owner has.

    While a step is planned nothing leaves the host: its place may be read by copies of that
    step, and would be written by others of it.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._num_owners = 0
        self._is_planning = False
        self._outdated: list[BlockHash] = []

    def begin_step(self) -> None:
        """A step is being planned from now on."""
        self._is_planning = True

    def end_step(self) -> None:
        """All of a step's copies are decided."""
        self._is_planning = False
        outdated, self._outdated = self._outdated, []
        self.forget_stored(outdated)

    def name(self, blocks: SequenceBlocks, num_full: int) -> None:
        """Give a sequence's full blocks names that no others have."""
        if not blocks.hashes:
            self._num_owners += 1
            blocks.root = self._num_owners.to_bytes(8, "little")
        for index in range(len(blocks.hashes), num_full):
            blocks.hashes.append(blocks.root + index.to_bytes(4, "little"))

    def forget(self, blocks: SequenceBlocks) -> None:
        """A sequence will not come back for what it has named."""
        for pool in self._pools:
            for block_hash in blocks.hashes:
                pool.drop(block_hash)
        self.forget_stored(blocks.hashes)
        blocks.hashes.clear()

    def forget_stored(self, hashes: Sequence[BlockHash]) -> None:
        """Free what the host holds of these."""
        if self._is_planning:
            self._outdated += hashes
            return
        hosts = [pool.host for pool in self._pools if pool.host is not None]
        for host in hosts:
            for block_hash in hashes:
                host.drop(block_hash)
