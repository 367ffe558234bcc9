"""The LoRA adapters that requests brought and engines took, for groups that come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from trimaran.comm.messages.messages import AdapterTaken, KeepAdapter


class KnownAdapters:
    """One model's adapters by task id, those used least recently first.

    A group that was gone has forgotten them, while clients still name them by their ids. One
    that a group refused is never here. All front ends hear of those that groups take, so no
    two know different ones by one id.
    """

    def __init__(self) -> None:
        self._adapters: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._num_bytes = 0

    def use(self, task: int) -> None:
        """A request asks for this one, if it is any."""
        if task in self._adapters:
            self._adapters.move_to_end(task)

    def taken(
        self, taken: AdapterTaken, adapter: dict[str, Any] | None, max_bytes: int
    ) -> None:
        """Remember what a group took, up to so many bytes of all. Without the ``adapter``,
        which came to another front end, no other one by its id is remembered here."""
        known = self._adapters.get(taken.adapter_id)
        if known is not None and known["digest"] == taken.digest:
            self.use(taken.adapter_id)
            return
        self._forget(taken.adapter_id)
        if adapter is None:
            return
        self._adapters[taken.adapter_id] = adapter
        self._num_bytes += _size(adapter)
        while self._num_bytes > max_bytes:
            self._forget(next(iter(self._adapters)))

    def messages(self) -> Iterator[KeepAdapter]:
        """What a group is told that knows none of them."""
        for task, adapter in self._adapters.items():
            yield KeepAdapter(adapter_id=task, adapter=adapter, is_remembered=True)

    def _forget(self, task: int) -> None:
        adapter = self._adapters.pop(task, None)
        if adapter is not None:
            self._num_bytes -= _size(adapter)


def _size(adapter: dict[str, Any]) -> int:
    return len(adapter["weights"]["data"])
