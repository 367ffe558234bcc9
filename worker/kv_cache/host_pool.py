"""The host cache: content of KV blocks that was evicted from the device."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.worker.kv_cache.free_blocks import DEFAULT_PRIORITY, FreeBlocks, Retention

BlockHash = bytes


class HostPool:
    """Slots for blocks in host memory, found by content.

    Content of the lowest priority is replaced first, then the least recently used. Content
    below the default priority gets no slot. Slots that a copy reads are pinned. Unless the pool
    ``can_replace`` content, new content gets no slot once all are used.
    """

    def __init__(self, num_slots: int, *, can_replace: bool = True) -> None:
        self.num_slots = num_slots
        self._can_replace = can_replace
        self.num_stored = 0
        """Blocks that were copied here since the start."""
        self.num_loaded = 0
        """Blocks that were copied back since the start."""
        self._slots = FreeBlocks(bytes(num_slots))
        self._slot_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._pins: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Slots with content."""
        return len(self._slot_of)

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The slot with this content."""
        return self._slot_of.get(block_hash)

    def store(self, block_hash: BlockHash, priority: int) -> int | None:
        """A slot to copy this content to; None if the content is here already or gets no
        slot."""
        known = self._slot_of.get(block_hash)
        if known is not None:
            self._touch(known)
            return None
        if priority < DEFAULT_PRIORITY or not len(self._slots):
            return None
        if not self._can_replace and self.num_used == self.num_slots:
            return None
        slot = self._slots.pop()
        if self._slots.priority_of(slot) > priority:
            self._slots.add(slot, has_content=True)
            return None
        old = self._hash_of.pop(slot, None)
        if old is not None:
            del self._slot_of[old]
            self._slots.forget(slot)
        self._slot_of[block_hash] = slot
        self._hash_of[slot] = block_hash
        self._slots.add(slot, has_content=True)
        self._slots.retain(slot, Retention(priority))
        self.num_stored += 1
        return slot

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the content of slots, which are being copied to the device, until `unpin`."""
        for slot in slots:
            count = self._pins.get(slot, 0)
            self._pins[slot] = count + 1
            if not count:
                self._slots.remove(slot)
            self.num_loaded += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """The copies from these slots are complete."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                self._slots.add(slot, has_content=True)

    def drop(self, block_hash: BlockHash) -> None:
        """Drop this content if the pool holds the content, which must not be pinned."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            del self._hash_of[slot]
            self._slots.forget(slot)
            self._slots.remove(slot)
            self._slots.add(slot, has_content=False)

    def _touch(self, slot: int) -> None:
        if slot not in self._pins:
            self._slots.remove(slot)
            self._slots.add(slot, has_content=True)

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state. For tests."""
        assert {slot: h for h, slot in self._slot_of.items()} == self._hash_of
        free = set(self._slots)
        assert len(free) == len(self._slots)
        assert free.isdisjoint(self._pins)
        assert free | self._pins.keys() == set(range(self.num_slots))
