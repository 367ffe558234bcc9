"""Prompt tables: embeddings that clients send for virtual tokens beyond the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.errors import RequestError
from trimaran.worker.layers.embedding import VocabParallelEmbedding
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import NewRow, SchedulerOutput

# Shapes: T tokens of the step, D hidden size, V vocabulary, E entries of a table.

_DTYPES = {"FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32}


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Embeddings [E, D] as sent by a client: token id V + e has entry e."""

    datatype: str
    """FP16, BF16 or FP32."""

    shape: tuple[int, int]
    data: bytes
    """Little-endian, row by row."""

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> PromptTable:
        """The table of a message in `to_wire`'s form."""
        num_entries, hidden_size = wire["shape"]
        return cls(wire["dtype"], (num_entries, hidden_size), wire["data"])

    def to_wire(self) -> dict[str, Any]:
        """For msgpack."""
        return {"dtype": self.datatype, "shape": list(self.shape), "data": self.data}

    def check(self, hidden_size: int, dtype: torch.dtype) -> None:
        """Check that the table fits a model of this hidden size and holds finite values alone.

        Other values would stay in blocks of the KV cache, whose next owner may read them with
        weights of 0.

        Raises:
            RequestError: names the value and the limit.
        """
        if self.datatype not in _DTYPES:
            raise RequestError(
                f"prompt_embedding_table is {self.datatype} but must be {', '.join(_DTYPES)}"
            )
        if self.shape[1] != hidden_size:
            raise RequestError(
                f"prompt_embedding_table has vectors of {self.shape[1]} values, but the "
                f"model's have {hidden_size}; send a table [entries, {hidden_size}]"
            )
        num_bytes = self.shape[0] * hidden_size * _DTYPES[self.datatype].itemsize
        if len(self.data) != num_bytes:
            raise RequestError(
                f"prompt_embedding_table has {len(self.data)} bytes, but {num_bytes} belong to "
                f"its shape {list(self.shape)} of {self.datatype}"
            )
        if not num_bytes:
            raise RequestError(
                f"prompt_embedding_table has the shape {list(self.shape)}: leave it out, or "
                "send an entry or more"
            )
        is_finite = self.tensor().to(dtype).isfinite()
        if not is_finite.all():
            entry, index = (~is_finite).nonzero()[0].tolist()
            raise RequestError(
                f"prompt_embedding_table holds {self.tensor()[entry, index]:g} at value "
                f"{index} of entry {entry}, which is no finite number in the model's "
                f"{str(dtype).removeprefix('torch.')}; send finite ones"
            )

    def tensor(self) -> Tensor:
        """[E, D] on the host."""
        return torch.frombuffer(bytearray(self.data), dtype=_DTYPES[self.datatype]).view(
            self.shape
        )


class PromptTables:
    """The rows whose prompts hold virtual tokens. A step without such rows costs nothing.

    Only prompts hold virtual tokens, so decodes are unchanged.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, tuple[npt.NDArray[np.int64], Tensor]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no row has virtual tokens."""
        return not self._rows

    def enter(self, new: NewRow, dtype: torch.dtype) -> None:
        """Copy a row's embeddings, one a token in order, to the device as ``dtype``."""
        if new.prompt_table is None:
            return
        positions = np.flatnonzero(new.token_ids >= self._vocab_size)
        entries = new.token_ids[positions].astype(np.int64) - self._vocab_size
        table = PromptTable.from_wire(new.prompt_table).tensor()
        vectors = table[torch.from_numpy(entries)].to(dtype)
        if self._device.type == "cuda":
            vectors = vectors.pin_memory().to(self._device, non_blocking=True)
        self._rows[new.row] = positions, vectors

    def leave(self, row: int) -> None:
        """Drop the table of the sequence that left this row."""
        self._rows.pop(row, None)

    def embed(
        self, decision: SchedulerOutput, token_ids_T: Tensor, embedding: VocabParallelEmbedding
    ) -> Tensor | None:
        """The embeddings [T, D] of a step's tokens; None if all tokens are in the vocabulary.

        Collective over the tensor group; all ranks return the same.
        """
        starts = np.cumsum(decision.num_scheduled_tokens) - decision.num_scheduled_tokens
        indices, vectors = [], []
        for entry, row in enumerate(decision.rows.tolist()):
            if row not in self._rows:
                continue
            positions, of_row = self._rows[row]
            first = int(decision.num_computed_tokens[entry])
            end = first + int(decision.num_scheduled_tokens[entry])
            low, high = np.searchsorted(positions, (first, end)).tolist()
            if low < high:
                indices.append(positions[low:high] - first + int(starts[entry]))
                vectors.append(of_row[low:high])
        if not indices:
            return None
        hidden_TD = embedding.forward(token_ids_T.clamp(max=self._vocab_size - 1))
        positions_on_device = to_device(np.concatenate(indices), hidden_TD.device)
        return hidden_TD.index_copy_(0, positions_on_device, torch.cat(vectors))
