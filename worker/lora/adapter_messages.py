"""LoRA adapters and cache operations on their way from rank 0 to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch import Tensor

from trimaran.comm.errors import ProtocolError
from trimaran.worker.lora.layout import AdapterLayout, Matrices

CHUNK_BYTES = 4 << 20
"""Bytes of adapter weights sent ahead of one step that does not need them; that step waits."""

Row = Sequence[int]
"""(module, layer, rank, inputs, outputs) of a pair of matrices."""


@dataclass(frozen=True, slots=True)
class OutgoingAdapter:
    """The weights of an adapter as rank 0 read them, in the model's dtype."""

    rows: list[Row]
    parts: list[memoryview]
    """Two matrices for each row."""

    @classmethod
    def of(cls, matrices: Iterable[Matrices], dtype: torch.dtype) -> OutgoingAdapter:
        """Collect ``matrices``, each of which is read once, in this call."""
        rows: list[Row] = []
        parts = []
        for one in matrices:
            rows.append((one.module, one.layer, *one.a.shape, one.b.shape[0]))
            parts += [_raw(one.a.to(dtype)), _raw(one.b.to(dtype))]
        return cls(rows, parts)

    def chunks(self) -> Iterator[memoryview]:
        """All weights in order, in chunks that are small enough to be sent before one step."""
        for part in self.parts:
            for offset in range(0, len(part), CHUNK_BYTES):
                yield part[offset : offset + CHUNK_BYTES]


class ArrivingAdapter:
    """The adapter on each rank; complete once all chunks have arrived.

    Ranks get the weights from rank 0, so a folder that is rewritten while it is served cannot
    make ranks differ.
    """

    def __init__(self, rows: list[Row], dtype: torch.dtype) -> None:
        self._rows = rows
        self._dtype = dtype
        self._data = bytearray()
        sizes = [rank * (inputs + outputs) for _, _, rank, inputs, outputs in rows]
        self._num_bytes = sum(sizes) * dtype.itemsize

    def add(self, chunk: bytes | memoryview) -> None:
        """Take the next chunk."""
        self._data += chunk

    @property
    def is_whole(self) -> bool:
        """Whether all chunks have arrived."""
        return len(self._data) == self._num_bytes

    @property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(module, layer, rank) of every pair of matrices."""
        return [(module, layer, rank) for module, layer, rank, *_ in self._rows]

    def matrices(self, layout: AdapterLayout) -> Iterator[Matrices]:
        """The matrices as they were sent: views of the received bytes."""
        if not self._rows:
            return
        values, offset = torch.frombuffer(self._data, dtype=self._dtype), 0
        for module, layer, rank, num_inputs, num_outputs in self._rows:
            at_b = offset + rank * num_inputs
            end = at_b + rank * num_outputs
            a, b = values[offset:at_b].view(rank, -1), values[at_b:end].view(-1, rank)
            yield Matrices(module, layer, a, b)
            offset = end


def _raw(matrix: Tensor) -> memoryview:
    return matrix.contiguous().view(-1).view(torch.uint8).numpy().data


_FIRST_BYTE = 0x81
"""The only key of a message of adapter operations; decisions have other keys."""


def encode_ops(ops: list[Any]) -> bytes:
    """A msgpack map of the operations of `take_ops`, of one data-parallel rank or of all."""
    packed: bytes = msgpack.packb({"adapters": ops})
    return packed


def holds_ops(payload: bytes) -> bool:
    """Whether ``payload`` is a message of adapter operations, and not a decision."""
    return payload[:1] == bytes([_FIRST_BYTE])


def decode_ops(payload: bytes) -> list[Any]:
    """The inverse of `encode_ops`.

    Raises:
        ProtocolError: ``payload`` is no message of adapter operations.
    """
    try:
        ops: list[Any] = msgpack.unpackb(payload)["adapters"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"cannot decode adapter operations in {len(payload)} bytes: {error}"
        ) from error
    return ops
