"""Puts the shards of all ranks together again, from the folder's description alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from trimaran.worker.config.engine_folder import EngineFolder


class Reassembled:
    """An engine folder's weights as whole tensors."""

    def __init__(self, path: Path) -> None:
        folder = EngineFolder.load(path)
        assert folder.mapping is not None
        self.config = folder.config
        self.tp_size = folder.mapping.tp_size
        ranks = [load_file(file) for file in folder.weight_files]
        stages = [
            ranks[first : first + self.tp_size] for first in range(0, len(ranks), self.tp_size)
        ]
        self.num_layers_of_stages = [
            len({name.split(".")[1] for name in stage[0] if name.startswith("layers.")})
            for stage in stages
        ]
        self.parts: dict[str, list[Tensor]] = {}
        for stage in stages:
            for name in stage[0]:
                assert name not in self.parts, f"{name} is on two stages"
                self.parts[name] = [rank[name] for rank in stage]

    def rows(self, name: str) -> Tensor:
        """A tensor cut by rows."""
        return torch.cat(self.parts[name])

    def columns(self, name: str) -> Tensor:
        """A tensor cut by columns."""
        return torch.cat(self.parts[name], dim=1)

    def same(self, name: str) -> Tensor:
        """A tensor that every rank has whole."""
        parts = self.parts[name]
        assert all(part.equal(parts[0]) for part in parts), name
        return parts[0]

    def vocabulary(self, name: str) -> Tensor:
        """A padded [vocabulary, hidden] without its padding, which must be zero."""
        whole = torch.cat(self.parts[name])
        assert not whole[self.config.vocab_size :].any(), name
        return whole[: self.config.vocab_size]

    def stacked(self, name: str, whole_rows: list[int]) -> list[Tensor]:
        """The tensors that were cut by rows and stacked, rank by rank."""
        sizes = [rows // self.tp_size for rows in whole_rows]
        cut = [torch.split(part, sizes) for part in self.parts[name]]
        return [torch.cat(pieces) for pieces in zip(*cut, strict=True)]

    def queries_keys_values(self, name: str) -> list[Tensor]:
        """Query, key and value tensors; ranks with copies of a key-value head must have
        equal copies."""
        config = self.config
        kv_rows = max(1, config.num_key_value_heads // self.tp_size) * config.head_size
        query_rows = config.num_attention_heads // self.tp_size * config.head_size
        cut = [torch.split(part, [query_rows, kv_rows, kv_rows]) for part in self.parts[name]]
        copies = max(1, self.tp_size // config.num_key_value_heads)
        for rank, (_, key, value) in enumerate(cut):
            assert key.equal(cut[rank // copies * copies][1]), name
            assert value.equal(cut[rank // copies * copies][2]), name
        query = torch.cat([pieces[0] for pieces in cut])
        key, value = (torch.cat([pieces[i] for pieces in cut[::copies]]) for i in (1, 2))
        return [query, key, value]
