"""What a host's memory holds of the KV cache: content that was evicted from the device."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.worker.kv_cache.free_blocks import DEFAULT_PRIORITY, FreeBlocks, Retention

BlockHash = bytes


class HostPool:
    """Slots for blocks in the host's memory, found by content.

    The lowest priority, then the longest unused is replaced first; content of a priority
    below the default is not worth a slot. Slots that are being read are pinned. Unless it
    ``can_replace`` content, what comes when all slots are full has no place.
    """

    def __init__(self, num_slots: int, *, can_replace: bool = True) -> None:
        self.num_slots = num_slots
        self._can_replace = can_replace
        self.num_stored = 0
        """Blocks that were moved here, over all time."""
        self.num_loaded = 0
        """Blocks that were copied back, over all time."""
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
        """A slot to write this content to; None if it is there already, or has no place."""
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
        """Keep what is in the slots until `unpin`: it is being copied to the device."""
        for slot in slots:
            count = self._pins.get(slot, 0)
            self._pins[slot] = count + 1
            if not count:
                self._slots.remove(slot)
            self.num_loaded += 1

    def unpin(self, slots: Iterable[int]) -> None:
        """The copies are made."""
        for slot in slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                self._slots.add(slot, has_content=True)

    def drop(self, block_hash: BlockHash) -> None:
        """Forget this content, which is not pinned, if it is here."""
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
        """Raise AssertionError unless every slot has one place. For tests."""
        assert {slot: h for h, slot in self._slot_of.items()} == self._hash_of
        free = set(self._slots)
        assert len(free) == len(self._slots)
        assert free.isdisjoint(self._pins)
        assert free | self._pins.keys() == set(range(self.num_slots))
