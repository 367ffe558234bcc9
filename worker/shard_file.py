"""The header of a safetensors file: names, types, shapes, and whether the file is whole."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file as its header describes it."""

    dtype: str
    """The format's own word: ``BF16``, ``F16``, ``F32`` and so on."""

    shape: tuple[int, ...]
    start: int
    """Where its bytes begin in the file."""

    num_bytes: int


def read_tensor_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name, after checking that the file ends where it should.

    Reads the header alone. Raises `ConfigError` for a file that is absent, cut short or of
    another format.
    """
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, num_bytes):
                raise ConfigError(_not_whole(path, f"it has {num_bytes} bytes and no header"))
            header = _parse_header(path, file.read(header_bytes))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Build or download the folder again, "
            "or correct its access rights."
        ) from None
    expected = (
        8
        + header_bytes
        + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    )
    if num_bytes != expected:
        raise ConfigError(
            _not_whole(path, f"it has {num_bytes} bytes and its header tells of {expected}")
        )
    return {name: _entry(value, 8 + header_bytes) for name, value in header.items()}


def _entry(value: dict[str, Any], data_start: int) -> TensorEntry:
    start, end = value["data_offsets"]
    return TensorEntry(value["dtype"], tuple(value["shape"]), data_start + start, end - start)


def _parse_header(path: Path, header: bytes) -> dict[str, dict[str, Any]]:
    try:
        entries: dict[str, dict[str, Any]] = json.loads(header)
        entries.pop("__metadata__", None)
        for entry in entries.values():
            int(entry["data_offsets"][1]), str(entry["dtype"]), tuple(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(_not_whole(path, "its header cannot be read")) from None
    return entries


def _not_whole(path: Path, reason: str) -> str:
    return f"{path}: not a whole safetensors file: {reason}. Build or copy the folder again."
