"""The header of a GGUF file, read in one pass: metadata by keys, and where each tensor lies.

The format is ggml's, version 2 or 3, little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The package `gguf` reads the same,
but makes an array for each word of a vocabulary: seconds where this module takes 0.1 s.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_NUMBERS = {
    0: np.uint8, 1: np.int8, 2: np.uint16, 3: np.int16, 4: np.uint32, 5: np.int32,
    6: np.float32, 7: np.bool_, 10: np.uint64, 11: np.int64, 12: np.float64,
}  # fmt: skip
"""Kinds of values that are numbers."""

_TEXT, _ARRAY = 8, 9
_PLAIN = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
}
"""Types of tensors that are arrays of numbers; the data of other types are bytes."""

_COUNT = struct.Struct("<Q")
_CODE = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file; its data is mapped, and read at first use."""

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    """As the file lists it: the innermost dim first."""

    data_offset: int
    """The tensor's first byte in the file."""

    n_bytes: int
    data: npt.NDArray[Any]
    """The numbers of a type of floats, or bytes [..., bytes of the innermost dim]."""


class GgufHeader:
    """The metadata and the tensors of a file."""

    def __init__(self, path: Path) -> None:
        """Read and check the header.

        Raises:
            ValueError: the file is cut off or damaged, or of another version or byte order.
            OSError: the file cannot be read.
        """
        self._mapped = np.memmap(path, mode="r")
        self._bytes = self._mapped.data
        self._at = 0
        try:
            self._read()
        except struct.error as error:
            raise ValueError(f"the file ends in its header ({error})") from None

    def _read(self) -> None:
        if bytes(self._take(len(_MAGIC))) != _MAGIC:
            raise ValueError("the file does not begin with GGUF")
        version = self._number(_CODE)
        if version not in _VERSIONS:
            raise ValueError(
                f"its version is {version:#x}, but {_VERSIONS[0]} and {_VERSIONS[1]} are read, "
                "in little-endian byte order"
            )
        num_tensors, num_keys = self._number(_COUNT), self._number(_COUNT)
        self.values: dict[str, Any] = {}
        """Values by their keys; float32 numbers as the shortest decimals for them."""

        for _ in range(num_keys):
            key = self._text()
            if key in self.values:
                raise ValueError(f"the key {key!r} is there twice")
            self.values[key] = self._value(self._number(_CODE))
        places = [self._place() for _ in range(num_tensors)]
        alignment = self.values.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{_ALIGNMENT_KEY} is {alignment!r} but must be a power of two")
        start = (self._at + alignment - 1) // alignment * alignment
        self.tensors: dict[str, GgufTensor] = {}
        """The tensors by the file's own names."""

        for name, dims, code, offset in places:
            if name in self.tensors:
                raise ValueError(f"the tensor {name!r} is there twice")
            self.tensors[name] = self._tensor(name, dims, code, start + offset)

    def _take(self, num_bytes: int) -> memoryview:
        end = self._at + num_bytes
        if end > len(self._bytes):
            raise ValueError(f"the file ends at byte {len(self._bytes)} of {end} or more")
        found = self._bytes[self._at : end]
        self._at = end
        return found

    def _number(self, form: struct.Struct) -> int:
        (found,) = form.unpack_from(self._bytes, self._at)
        self._at += form.size
        return int(found)

    def _text(self) -> str:
        return str(self._take(self._number(_COUNT)), "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            (found,) = self._numbers(kind, 1)
            # The text of a float32 has no digits that only its float64 has.
            return float(str(found)) if isinstance(found, np.floating) else found.item()
        of, count = self._number(_CODE), self._number(_COUNT)
        if of in _NUMBERS:
            return self._numbers(of, count).tolist()
        if of == _ARRAY:
            raise ValueError("arrays of arrays are not read")
        return [self._value(of) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"a value is of the unknown kind {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._number(_CODE)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"the tensor {name!r} has {num_dims} dims")
        dims = tuple(self._number(_COUNT) for _ in range(num_dims))
        return name, dims, self._number(_CODE), self._number(_COUNT)

    def _tensor(self, name: str, dims: tuple[int, ...], code: int, start: int) -> GgufTensor:
        kind = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        inner = dims[0] if dims else 1
        if inner % block:
            raise ValueError(f"rows of {inner} numbers of {name!r} are no blocks of {block}")
        count = inner
        for size in dims[1:]:
            count *= size
        num_bytes = count // block * block_bytes
        self._at = start
        self._take(num_bytes)
        data = self._mapped[start : start + num_bytes]
        shape = tuple(reversed(dims))
        if kind in _PLAIN:
            data = data.view(_PLAIN[kind]).reshape(shape)
        else:
            data = data.reshape(*shape[:-1], inner // block * block_bytes)
        return GgufTensor(kind, dims, start, num_bytes, data)
