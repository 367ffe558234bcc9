"""The tensors of a safetensors file, read without mapping it into memory.

Truncating a mapped file kills every process that touches the lost pages; a read reports the
shorter length instead.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimaran.comm.files.input_files import require_file
from trimaran.worker.lora.layout import AdapterFormatError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_TOO_SHORT = "it ends before its last tensor does"
_MAX_HEADER_BYTES = 100_000_000
"""Largest header that the format allows."""


class StoredTensor(NamedTuple):
    """A tensor's entry in the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file whose header is read at construction, and whose values are read on demand."""

    def __init__(self, path: Path) -> None:
        """Read names and shapes.

        Raises:
            AdapterFormatError: the file cannot be read, or has another format.
        """
        self._path = path
        try:
            require_file(path)
            with path.open("rb") as file:
                self.tensors = self._header(file)
        except OSError as error:
            raise self._unreadable(str(error)) from None

    def read(self) -> dict[str, Tensor]:
        """All tensors, copied to memory.

        Raises:
            AdapterFormatError: the file is shorter than its header says, or was replaced.
        """
        try:
            with self._path.open("rb") as file:
                if self._header(file) != self.tensors:
                    raise AdapterFormatError(
                        f"{self._path}: holds other tensors than a moment ago. Ask again when "
                        "it is written, and replace files of adapters by renaming others."
                    )
                return {key: self._tensor(file, each) for key, each in self.tensors.items()}
        except OSError as error:
            raise self._unreadable(str(error)) from None

    def _tensor(self, file: BufferedReader, stored: StoredTensor) -> Tensor:
        raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
        file.seek(stored.begin)
        if file.readinto(raw.numpy().data) < stored.num_bytes:
            raise self._unreadable(_TOO_SHORT)
        return raw.view(stored.dtype).view(stored.shape)

    def _header(self, file: BufferedReader) -> dict[str, StoredTensor]:
        num_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(num_bytes, _MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            tensors = {key: self._stored(key, 8 + num_bytes, v) for key, v in header.items()}
        except AdapterFormatError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._unreadable(
                "it does not begin with the names and shapes of tensors. Save the adapter "
                "with safe_serialization=True"
            ) from None
        # Read no more than the file has: memory for a read is allocated before the read.
        size = os.fstat(file.fileno()).st_size
        if any(each.begin + each.num_bytes > size for each in tensors.values()):
            raise self._unreadable(_TOO_SHORT)
        return tensors

    def _stored(self, key: str, first: int, said: Mapping[str, Any]) -> StoredTensor:
        shape, (begin, end) = tuple(said["shape"]), said["data_offsets"]
        if any(type(number) is not int for number in (*shape, begin, end)):
            raise TypeError(shape)
        if said["dtype"] not in _DTYPES:
            raise AdapterFormatError(
                f"{self._path}: {key!r} is {said['dtype']} but must be one of "
                f"{', '.join(_DTYPES)}"
            )
        stored = StoredTensor(_DTYPES[said["dtype"]], shape, first + begin)
        if min((begin, *shape)) < 0 or end - begin != stored.num_bytes:
            raise self._unreadable(
                f"{key!r} of shape {list(shape)} has {end - begin} bytes instead of "
                f"{stored.num_bytes}"
            )
        return stored

    def _unreadable(self, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self._path}: cannot be read: {why}")
