"""Medusa heads: each predicts the token at one position behind the next, from one hidden state.

Medusa by Cai et al. (2024). Head i drafts the token i positions behind the token that the
target chooses itself. The likeliest token of each head makes a chain; the likeliest tokens of
each head make a tree, in which each token of a head may follow each one of the head before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.worker.attention.backend import KVCacheSpec
from trimaran.worker.config.draft_network import MedusaConfig
from trimaran.worker.layers.embedding import ParallelLMHead
from trimaran.worker.layers.linear import ColumnParallelLinear
from trimaran.worker.models.drafting.likeliest import likeliest_ids, likely_ids
from trimaran.worker.models.interfaces import CausalLM

# Shapes: N sequences, D hidden size of the target, V ids that the heads draft.

_VOCAB_MULTIPLE = 64
"""Rows of a head's output matrix are padded to a multiple of this."""


class MedusaHead(nn.Module):
    """Residual blocks ``x + silu(Wx + b)``, and an output matrix."""

    def __init__(self, target: CausalLM, config: MedusaConfig) -> None:
        super().__init__()
        context, width = target.context.unquantized(), target.config.hidden_size
        self.blocks = nn.ModuleList(
            ColumnParallelLinear(context.alone(), width, width, bias=True)
            for _ in range(config.num_layers)
        )
        sizes = target.config.vocab_size, target.vocab_size_padded
        if config.num_draft_ids:
            multiple = math.lcm(_VOCAB_MULTIPLE, context.tp.size)
            sizes = config.num_draft_ids, -(-config.num_draft_ids // multiple) * multiple
        self.lm_head = ParallelLMHead(context, *sizes, width)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Logits of each sequence [N, V]."""
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
        self.heads = nn.ModuleList(MedusaHead(target, config) for _ in range(config.num_heads))
        self.num_target_ids = target.config.vocab_size
        self.d2t: nn.Parameter | None = None
        """Difference of each id that the heads draft to the target's id, int64 [V]; None where
        they draft all ids."""

        if config.num_draft_ids:
            offsets = torch.zeros(
                config.num_draft_ids, dtype=torch.int64, device=target.context.device
            )
            self.d2t = nn.Parameter(offsets, requires_grad=False)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """None: no token has an entry."""
        return []

    def propose(self, states_NX: Tensor, next_ids_N: Tensor, count: int) -> Tensor:
        """See `CachelessHeads.propose`; the sampled ids are unused."""
        chain = [likeliest_ids(logits, self.d2t) for logits in self._logits(states_NX, count)]
        return torch.stack(chain, dim=1)

    def propose_ranks(self, states_NX: Tensor, widths: list[int]) -> Tensor:
        """See `RankedHeads.propose_ranks`."""
        pairs = zip(self._logits(states_NX, len(widths)), widths, strict=True)
        return torch.cat(
            [likely_ids(logits, width, self.d2t) for logits, width in pairs], dim=1
        )

    def _logits(self, states_ND: Tensor, count: int) -> Iterator[Tensor]:
        """Logits of the first ``count`` heads."""
        for head in self.heads[:count]:
            assert isinstance(head, MedusaHead)
            yield head.logits(states_ND)
