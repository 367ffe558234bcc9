"""Host memory that packs a step's integer inputs, and their single copy to the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_WIDE = ("positions", "token_indices", "slots", "sampled_indices", "logits_indices")
_NARROW = ("query_start_loc", "seq_lens", "rows")


class StepArrays:
    """The packed arrays of one shape of step, as views of one buffer.

    int64: ``positions`` [T], ``token_indices`` [T], ``slots`` [groups, T],
    ``sampled_indices`` [N], ``logits_indices`` [N]. int32: ``query_start_loc`` [S + 1],
    ``seq_lens`` [S], ``rows`` [S]. ``wide`` is the whole int64 part.
    """

    wide: npt.NDArray[np.int64]

    positions: npt.NDArray[np.int64]
    token_indices: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    sampled_indices: npt.NDArray[np.int64]
    logits_indices: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]


Shape = tuple[int, int, int, int]
"""Tokens, entries, sampled entries, KV groups."""


def _sizes(shape: Shape) -> dict[str, int]:
    tokens, entries, sampled, groups = shape
    return {
        "positions": tokens,
        "token_indices": tokens,
        "slots": tokens * groups,
        "sampled_indices": sampled,
        "logits_indices": sampled,
        "query_start_loc": entries + 1,
        "seq_lens": entries,
        "rows": entries,
    }


def num_bytes(shape: Shape) -> int:
    """Bytes that a step of this shape packs."""
    sizes = _sizes(shape)
    return sum(8 * sizes[name] for name in _WIDE) + sum(4 * sizes[name] for name in _NARROW)


def _views(memory: Tensor, shape: Shape) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    sizes = _sizes(shape)
    start = 0
    for names, dtype in ((_WIDE, torch.int64), (_NARROW, torch.int32)):
        for name in names:
            end = start + sizes[name] * dtype.itemsize
            views[name] = memory[start:end].view(dtype)
            start = end
    views["slots"] = views["slots"].view(shape[3], shape[0])
    return views


class _Slot:
    """One step's staging buffer; on a GPU with a device buffer and the event of the copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self.host = torch.empty(0, dtype=torch.uint8)
        self.twin = self.host
        self.copied: torch.cuda.Event | None = None
        self._known: dict[Shape, tuple[StepArrays, Mapping[str, Tensor]]] = {}

    def views(self, shape: Shape) -> tuple[StepArrays, Mapping[str, Tensor]]:
        """Views for the host to fill, and for the device to read."""
        known = self._known.get(shape)
        if known is not None:
            return known
        size = num_bytes(shape)
        if size > len(self.host):
            self._grow(max(size, 2 * len(self.host)))
        host_views = _views(self.host, shape)
        arrays = StepArrays()
        for name, view in host_views.items():
            setattr(arrays, name, view.numpy())
        num_wide = sum(_sizes(shape)[name] for name in _WIDE)
        arrays.wide = self.host[: 8 * num_wide].view(torch.int64).numpy()
        made = arrays, host_views if self.is_cpu else _views(self.twin, shape)
        # Decode steps repeat their shapes, so views of theirs are cached; prompts' are not.
        if shape[0] == shape[1]:
            self._known[shape] = made
        return made

    def _grow(self, size: int) -> None:
        self._known.clear()
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=not self.is_cpu)
        self.twin = (
            self.host if self.is_cpu else torch.empty_like(self.host, device=self.device)
        )

    def send(self, size: int) -> None:
        """Start the copy to the device."""
        if not self.is_cpu:
            self.twin[:size].copy_(self.host[:size], non_blocking=True)
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()


class StagingRing:
    """A ring of as many staging buffers as steps may be in flight.

    A buffer is written again only after its copy has finished, so the host never races a copy.
    On the CPU the step reads the buffer itself, and ends before the next step is packed.
    """

    def __init__(self, device: torch.device, num_slots: int) -> None:
        self._slots = [_Slot(device) for _ in range(1 if device.type == "cpu" else num_slots)]
        self._current = 0
        self._size = 0

    def next(self, *shape: int) -> tuple[StepArrays, Mapping[str, Tensor]]:
        """Arrays to fill before `send`, and the device tensors that will hold the same
        values."""
        self._current = (self._current + 1) % len(self._slots)
        slot = self._slots[self._current]
        if slot.copied is not None:
            slot.copied.synchronize()
        tokens, entries, sampled, groups = shape
        key = (tokens, entries, sampled, groups)
        self._size = num_bytes(key)
        return slot.views(key)

    def send(self) -> None:
        """Start the copy of the buffer that `next` returned."""
        self._slots[self._current].send(self._size)

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory."""
        return sum(len(slot.host) for slot in self._slots if not slot.is_cpu)


_MAX_PAGEABLE = 1 << 16
"""Bytes up to which CUDA takes the data of a copy along with the call. For more pageable memory
the host may wait until the stream has reached the copy."""


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A small array on the device: shared memory on the CPU, a copy elsewhere.

    The host never waits. A read-only array, such as a message's, is copied on the CPU, because
    torch warns of read-only memory.
    """
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    if tensor.nbytes > _MAX_PAGEABLE:
        # From a pool, which reuses the memory once the copy has finished.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
