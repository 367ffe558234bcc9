"""Medusa heads: each predicts the token at one place behind the next, from one hidden state.

Medusa by Cai et al. (2024). Head i drafts the token i places behind the token that the target
chooses itself. The likeliest token of each head makes a chain; the likeliest tokens of each
head make a tree, in which each token of a head may follow each one of the head before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.worker.attention.backend import KVCacheSpec
from trimaran.worker.config.draft_network import MedusaConfig
from trimaran.worker.layers.embedding import ParallelLMHead
from trimaran.worker.layers.linear import ColumnParallelLinear
from trimaran.worker.models.drafting.likeliest import likeliest_ids, likely_ids
from trimaran.worker.models.interfaces import CausalLM

# Shapes: N sequences, D hidden size of the target, V vocabulary.


class MedusaHead(nn.Module):
    """Residual blocks ``x + silu(Wx + b)``, and an output matrix."""

    def __init__(self, target: CausalLM, num_layers: int) -> None:
        super().__init__()
        context, width = target.context.unquantized(), target.config.hidden_size
        self.blocks = nn.ModuleList(
            ColumnParallelLinear(context.alone(), width, width, bias=True)
            for _ in range(num_layers)
        )
        sizes = target.config.vocab_size, target.vocab_size_padded, width
        self.lm_head = ParallelLMHead(context, *sizes)

    def forward(self, states_ND: Tensor) -> Tensor:
        """The likeliest id of each sequence, int64 [N]."""
        return likeliest_ids(self._logits(states_ND))

    def likely_ids(self, states_ND: Tensor, count: int) -> Tensor:
        """The likeliest ids of each sequence, the likeliest first, int64 [N, count]."""
        return likely_ids(self._logits(states_ND), count)

    def _logits(self, states_ND: Tensor) -> Tensor:
        for block in self.blocks:
            states_ND = states_ND + F.silu(block.forward(states_ND))
        return self.lm_head.forward(states_ND)


class MedusaHeads(nn.Module):
    """All heads of a checkpoint. They have no cache."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: MedusaConfig, target: CausalLM) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.state_size = target.config.hidden_size
        self.heads = nn.ModuleList(
            MedusaHead(target, config.num_layers) for _ in range(config.num_heads)
        )

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """None: no token has an entry."""
        return []

    def propose(self, states_NX: Tensor, next_ids_N: Tensor, count: int) -> Tensor:
        """See `CachelessHeads.propose`; the sampled ids are unused."""
        return torch.stack([head.forward(states_NX) for head in self.heads[:count]], dim=1)

    def propose_ranks(self, states_NX: Tensor, widths: list[int]) -> Tensor:
        """See `RankedHeads.propose_ranks`."""
        pairs = zip(self.heads, widths, strict=False)
        likely: list[Tensor] = []
        for head, width in pairs:
            assert isinstance(head, MedusaHead)
            likely.append(head.likely_ids(states_NX, width))
        return torch.cat(likely, dim=1)
