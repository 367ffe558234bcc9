"""The LoRA adapters that requests brought, for worker groups that start or come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from trimaran.comm.messages import KeepAdapter, Submit


class KnownAdapters:
    """One model's adapters by task id, those used least recently first.

    A group that was gone has forgotten them, while clients still name them by their ids.
    """

    def __init__(self) -> None:
        self._adapters: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._num_bytes = 0

    def note(self, submit: Submit, max_bytes: int) -> KeepAdapter | None:
        """Remember what a request brings, up to so many bytes of all, and that it uses what
        it names; the message for the groups that it does not go to, if it brings any."""
        if submit.adapter is None:
            return None
        if "weights" not in submit.adapter:
            if submit.adapter_id in self._adapters:
                self._adapters.move_to_end(submit.adapter_id)
            return None
        self._forget(submit.adapter_id)
        self._adapters[submit.adapter_id] = submit.adapter
        self._num_bytes += _size(submit.adapter)
        while self._num_bytes > max_bytes:
            self._forget(next(iter(self._adapters)))
        return KeepAdapter(adapter_id=submit.adapter_id, adapter=submit.adapter)

    def messages(self) -> Iterator[KeepAdapter]:
        """What a group is told that knows none of them."""
        for task, adapter in self._adapters.items():
            yield KeepAdapter(adapter_id=task, adapter=adapter)

    def _forget(self, task: int) -> None:
        adapter = self._adapters.pop(task, None)
        if adapter is not None:
            self._num_bytes -= _size(adapter)


def _size(adapter: dict[str, Any]) -> int:
    return len(adapter["weights"]["data"])
