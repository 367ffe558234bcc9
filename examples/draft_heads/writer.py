"""Greedy outputs of a Llama for many rows at once, with keys and values at fixed places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from target import Target
from torch import Tensor

# Shapes: M rows, L ids of a row, D hidden size, K heads of keys, G heads of queries for each of
# them, H head size.


class Writer:
    """Writes rows of ``length`` ids, one place of all rows in a step. Rows begin with ids of
    any number, and go on with the target's likeliest ids.

    The keys and values of 4,096 rows of 320 ids of SmolLM2-135M take 30 GB.
    """

    def __init__(self, target: Target, max_rows: int, length: int) -> None:
        config = target.config
        self._target = target
        self._length = length
        self._num_keys = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = config.num_hidden_layers, max_rows, self._num_keys, length, size
        make = {"dtype": target.model.dtype, "device": target.device}
        self._keys, self._values = torch.empty(shape, **make), torch.empty(shape, **make)
        places = torch.arange(length, device=target.device)[None]
        rotary = target.model.model.rotary_emb
        cos, sin = rotary(torch.empty(1, **make), places)
        self._cos_LH, self._sin_LH = cos[0], sin[0]

    @torch.no_grad()
    def write(self, beginnings: list[list[int]]) -> tuple[Tensor, Tensor]:
        """The rows [M, L] on the host, and the number of ids of each up to its end id [M].

        Each beginning has at least one id and fewer than a row.
        """
        target, length = self._target, self._length
        rows = torch.zeros((len(beginnings), length), dtype=torch.int64)
        starts = torch.tensor([len(each) for each in beginnings])
        for row, each in zip(rows, beginnings, strict=True):
            row[: len(each)] = torch.tensor(each)
        rows, starts = rows.to(target.device), starts.to(target.device)
        for place in range(length - 1):
            own = self._next_ids(rows[:, place], place)
            rows[:, place + 1] = torch.where(place + 1 < starts, rows[:, place + 1], own)
        places = torch.arange(length, device=target.device)
        is_end = torch.isin(rows, torch.tensor(target.end_ids, device=target.device))
        is_end &= places >= starts[:, None]
        is_end[:, -1] = True
        # The end id itself is drafted too.
        return rows.cpu(), (is_end.int().argmax(1) + 1).cpu()

    def _next_ids(self, ids_M: Tensor, place: int) -> Tensor:
        """The likeliest ids behind the ids at one place, whose keys and values are kept."""
        model = self._target.model.model
        x_MD = model.embed_tokens(ids_M)
        for layer, keys, values in zip(model.layers, self._keys, self._values, strict=True):
            normed_MD = layer.input_layernorm(x_MD)
            attention = layer.self_attn
            query_MKGH, key_MKGH, value_MKGH = (
                project(normed_MD).view(len(ids_M), self._num_keys, -1, keys.shape[-1])
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys[: len(ids_M), :, place] = self._rotated(key_MKGH, place)[:, :, 0]
            values[: len(ids_M), :, place] = value_MKGH[:, :, 0]
            # Queries that share keys are queries of one row: each key is read once.
            output_MKGH = F.scaled_dot_product_attention(
                self._rotated(query_MKGH, place),
                keys[: len(ids_M), :, : place + 1],
                values[: len(ids_M), :, : place + 1],
            )
            x_MD = x_MD + attention.o_proj(output_MKGH.flatten(1))
            x_MD = x_MD + layer.mlp(layer.post_attention_layernorm(x_MD))
        return self._target.model.lm_head(model.norm(x_MD)).argmax(-1)

    def _rotated(self, heads: Tensor, place: int) -> Tensor:
        first, second = heads.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        return heads * self._cos_LH[place] + turned * self._sin_LH[place]
