"""The header of a safetensors file: names, dtypes, shapes, checksums and the file's length."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, require_file

CHECKSUM_CHARS = 64
CHUNK_BYTES = 8 << 20
"""Bytes of a tensor for each checksum; the last checksum covers the remainder."""

ORIGIN_KEY = "origin"
"""Metadata key of the configuration that the tensors were cut for."""

_READ_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version "
_CHECKSUM_PREFIX = "sha256:"
_CHUNKS_PREFIX = f"xxh3_128/{CHUNK_BYTES}:"
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file as its header describes it."""

    dtype: str
    """The format's name of the dtype: ``BF16``, ``F16``, ``F32`` and so on."""

    shape: tuple[int, ...]
    start: int
    """The tensor's first byte in the file."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The contents of a file's header."""

    entries: dict[str, TensorEntry]
    checksums: dict[str, str]
    """SHA-256 of each tensor's bytes in hexadecimal; empty in files of other builders."""

    chunks: dict[str, list[bytes]]
    """XXH3-128 of each `CHUNK_BYTES` of each tensor; none in files of earlier versions."""

    checksum: str
    """SHA-256 of the header, which covers all tensors by their checksums."""

    origin: str
    """The configuration that the tensors were cut for, as JSON; empty if unknown."""


def checksum_key(name: str) -> str:
    """The metadata key of a tensor's checksum."""
    return _CHECKSUM_PREFIX + name


def chunks_key(name: str) -> str:
    """The metadata key for the checksums of a tensor's chunks, which are stored as one text."""
    return _CHUNKS_PREFIX + name


def num_chunk_chars(num_bytes: int) -> int:
    """Length of the text with the checksums of the chunks of a tensor."""
    return 2 * _DIGEST_BYTES * -(-num_bytes // CHUNK_BYTES)


def _digests(text: str) -> list[bytes]:
    digests = bytes.fromhex(text)
    return [
        digests[offset : offset + _DIGEST_BYTES]
        for offset in range(0, len(digests), _DIGEST_BYTES)
    ]


def read_tensor_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file by name; see `read_header`."""
    return read_header(path).entries


def read_header(path: Path) -> ShardHeader:
    """A file's header, after a check of the file's length against it.

    Reads no tensor. Raises `ConfigError` for a file that is missing, truncated or of another
    format.
    """
    try:
        require_file(path)
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if prefix == _LFS_POINTER:
                raise ConfigError(
                    f"{path}: is a pointer of Git LFS, not the weights. Run git lfs pull."
                )
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, num_bytes):
                raise ConfigError(_not_whole(path, f"it has {num_bytes} bytes and no header"))
            text = file.read(header_bytes)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Build or download the folder again, "
            "or correct its access rights."
        ) from None
    header, metadata = _parse_header(path, text)
    data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    expected = 8 + header_bytes + data_bytes
    if num_bytes != expected:
        raise ConfigError(
            _not_whole(path, f"it has {num_bytes} bytes and its header tells of {expected}")
        )
    entries = {name: _entry(value, 8 + header_bytes) for name, value in header.items()}
    return ShardHeader(
        entries=entries,
        checksums={
            key.removeprefix(_CHECKSUM_PREFIX): str(value)
            for key, value in metadata.items()
            if key.startswith(_CHECKSUM_PREFIX)
        },
        chunks=_chunks(path, entries, metadata),
        checksum=hashlib.sha256(prefix + text).hexdigest(),
        origin=str(metadata.get(ORIGIN_KEY, "")),
    )


def _chunks(
    path: Path, entries: dict[str, TensorEntry], metadata: dict[str, Any]
) -> dict[str, list[bytes]]:
    """The checksums of the chunks of each tensor with checksums."""
    chunks = {}
    for name, entry in entries.items():
        text = metadata.get(chunks_key(name))
        if text is None:
            continue
        try:
            chunks[name] = _digests(text)
            is_whole = len(text) == num_chunk_chars(entry.num_bytes)
        except (TypeError, ValueError):
            is_whole = False
        if not is_whole:
            raise ConfigError(
                _not_whole(path, f"its header has no checksum for each chunk of {name!r}")
            )
    return chunks


def checksum_of(path: Path, start: int, num_bytes: int) -> str:
    """SHA-256 of a part of a file, up to the file's end.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while num_bytes:
            piece = file.read(min(num_bytes, _READ_BYTES))
            if not piece:
                break
            digest.update(piece)
            num_bytes -= len(piece)
    return digest.hexdigest()


def _entry(value: dict[str, Any], data_start: int) -> TensorEntry:
    start, end = value["data_offsets"]
    return TensorEntry(value["dtype"], tuple(value["shape"]), data_start + start, end - start)


def _parse_header(
    path: Path, header: bytes
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The tensors' values by name, and the metadata."""
    try:
        values = parse_json(header)
        metadata = dict(values.pop("__metadata__", None) or {})
        entries: dict[str, dict[str, Any]] = values
        if not all(map(_is_entry, entries.values())):
            raise ValueError("no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ConfigError(_not_whole(path, "its header cannot be read")) from None
    return entries, metadata


def _is_entry(value: dict[str, Any]) -> bool:
    """Whether a header's value describes a tensor."""
    start, end = value["data_offsets"]
    sizes = [start, end, *value["shape"]]
    are_sizes = all(type(size) is int and 0 <= size < 1 << 63 for size in sizes)
    return isinstance(value["dtype"], str) and are_sizes and start <= end


def _not_whole(path: Path, reason: str) -> str:
    return f"{path}: not a whole safetensors file: {reason}. Build or copy the folder again."
