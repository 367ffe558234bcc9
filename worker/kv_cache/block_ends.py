"""Blocks within which a prompt may begin, by what stands before them."""

from __future__ import annotations

from array import array

from trimaran.worker.kv_cache.host_pool import BlockHash
from trimaran.worker.kv_cache.sequence_blocks import hash_of


class BlockEnds:
    """Remembers one block for each beginning: the partial last one of a sequence that ended,
    or the one that its prompt ended in. The oldest is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ids: dict[BlockHash, array[int]] = {}

    def put(self, parent: BlockHash, token_ids: array[int]) -> None:
        """Remember the block with these ids, which stands behind ``parent``."""
        self._ids.pop(parent, None)
        self._ids[parent] = token_ids
        if len(self._ids) > self._most:
            del self._ids[next(iter(self._ids))]

    def drop(self, parent: BlockHash) -> None:
        """The block is gone."""
        self._ids.pop(parent, None)

    def match(self, parent: BlockHash, wanted: array[int]) -> tuple[BlockHash, int] | None:
        """A block's hash, and how many of ``wanted`` it begins with: half of them at least,
        as beginning with it has a price."""
        ids = self._ids.get(parent)
        if ids is None:
            return None
        count, most = 0, min(len(ids), len(wanted))
        while count < most and ids[count] == wanted[count]:
            count += 1
        if count == 0 or 2 * count < len(wanted):
            return None
        return hash_of(parent, ids), count
