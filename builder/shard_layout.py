"""The position of each tensor in a rank's weight file, and the file's header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from trimaran.worker.config.shard_file import (
    CHECKSUM_CHARS,
    ORIGIN_KEY,
    TensorEntry,
    checksum_key,
    chunks_key,
    num_chunk_chars,
)
from trimaran.worker.models.weights.checkpoint import DTYPE_WORDS


class ShardLayout:
    """A safetensors file whose layout is known before any of its tensors is made.

    The header holds checksums of every tensor, and its length does not depend on them.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], origin: Mapping[str, Any]
    ) -> None:
        """``origin`` describes what the tensors were cut for:
        `worker/config/engine_folder.py`."""
        self._origin = json.dumps(origin)
        self.dtypes = {name: each.dtype for name, each in parameters.items()}
        # The widest dtypes first, so that every tensor is aligned.
        names = sorted(parameters, key=lambda name: (-parameters[name].itemsize, name))
        self._ends: dict[str, int] = {}
        end = 0
        for name in names:
            end += parameters[name].nbytes
            self._ends[name] = end
        self._num_bytes = {name: parameters[name].nbytes for name in names}
        self._shapes = {name: tuple(parameters[name].shape) for name in names}
        start = self.header_bytes
        self.num_bytes = start + end
        self.entries = {
            name: TensorEntry(
                DTYPE_WORDS[self.dtypes[name]],
                self._shapes[name],
                start + self._ends[name] - parameters[name].nbytes,
                parameters[name].nbytes,
            )
            for name in names
        }

    @property
    def header_bytes(self) -> int:
        """Length of the header; the tensors begin there."""
        blank = {
            name: "0" * (CHECKSUM_CHARS + num_chunk_chars(num_bytes))
            for name, num_bytes in self._num_bytes.items()
        }
        return len(self.header(blank))

    def header(self, checksums: Mapping[str, str]) -> bytes:
        """The header's bytes, given the checksums of each tensor.

        These are one text: the tensor's SHA-256, then the XXH3-128 of its chunks.
        """
        metadata = {"format": "pt", ORIGIN_KEY: self._origin}
        for name in self._ends:
            found = checksums[name]
            metadata[checksum_key(name)] = found[:CHECKSUM_CHARS]
            metadata[chunks_key(name)] = found[CHECKSUM_CHARS:]
        values: dict[str, object] = {"__metadata__": metadata}
        start = 0
        for name, end in self._ends.items():
            word = DTYPE_WORDS[self.dtypes[name]]
            shape = list(self._shapes[name])
            values[name] = {"dtype": word, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(values, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text
