"""ReDrafter: a recurrent head that drafts from the target's last state and the tokens since.

Recurrent drafting by Cheng et al. (2024), https://arxiv.org/abs/2403.09919. A chain is the
head's beam search with one beam: the likeliest token at each position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.worker.attention.backend import KVCacheSpec
from trimaran.worker.config.draft_network import RedrafterConfig
from trimaran.worker.config.speculation_config import MAX_DRAFT_TOKENS
from trimaran.worker.layers.embedding import ParallelLMHead
from trimaran.worker.layers.linear import ColumnParallelLinear
from trimaran.worker.models.drafting.likeliest import likeliest_ids, likely_scores
from trimaran.worker.models.interfaces import CausalLM

# Shapes: N sequences, D hidden size of the target, E width of the head's last layers, V
# vocabulary.


class RecurrentHead(nn.Module):
    """One head for all positions. Its state begins with zeros behind the target's own token,
    and takes in the embedding of each token. The head has no cache."""

    taps: tuple[int, ...] = ()
    num_heads = MAX_DRAFT_TOKENS

    def __init__(self, config: RedrafterConfig, target: CausalLM) -> None:
        super().__init__()
        context, width = target.context.unquantized(), target.config.hidden_size
        alone, inner = context.alone(), config.exit_size
        self.state_size = width
        self._target = [target]
        self.is_recurrent = config.is_recurrent
        if inner != 2 * width:
            self.input_proj = ColumnParallelLinear(alone, 2 * width, inner, bias=True)
        if config.is_recurrent:
            self.rnn_u = ColumnParallelLinear(alone, width, width, bias=True)
            self.rnn_w = ColumnParallelLinear(alone, width, width, bias=False)
        self.blocks = nn.ModuleList(
            ColumnParallelLinear(alone, inner, inner, bias=True)
            for _ in range(config.num_layers)
        )
        sizes = target.config.vocab_size, target.vocab_size_padded, inner
        self.lm_head = ParallelLMHead(context, *sizes)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """None: no token has an entry."""
        return []

    def propose(self, states_NX: Tensor, next_ids_N: Tensor, count: int) -> Tensor:
        """See `CachelessHeads.propose`."""
        drafted: list[Tensor] = []
        ids_N, state_ND = next_ids_N, torch.zeros_like(states_NX)
        for _ in range(count):
            state_ND = self._next_state(ids_N, state_ND)
            ids_N = likeliest_ids(self._logits(torch.cat((states_NX, state_ND), dim=-1)))
            drafted.append(ids_N)
        return torch.stack(drafted, dim=1)

    def propose_beams(
        self, states_NX: Tensor, next_ids_N: Tensor, width: int, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BeamHeads.propose_beams`."""
        count = len(states_NX)
        state_ND = self._next_state(next_ids_N, torch.zeros_like(states_NX))
        logits_NV = self._logits(torch.cat((states_NX, state_ND), dim=-1))
        ids_Nw, scores_Nw = likely_scores(logits_NV, width)
        from_Nw = torch.zeros_like(ids_Nw)
        levels = [(ids_Nw, scores_Nw, from_Nw)]
        wide_NX = states_NX.repeat_interleave(width, dim=0)
        firsts_N1 = torch.arange(count, device=ids_Nw.device)[:, None]
        for level in range(1, depth):
            # Rows of the states before: one a sequence behind the root, else one a beam.
            rows_Nw = firsts_N1 * (1 if level == 1 else width) + from_Nw
            before_ND = state_ND.index_select(0, rows_Nw.reshape(-1))
            state_ND = self._next_state(ids_Nw.reshape(-1), before_ND)
            logits_NV = self._logits(torch.cat((wide_NX, state_ND), dim=-1))
            likely, log_probs = likely_scores(logits_NV, width)
            all_Nc = (scores_Nw[:, :, None] + log_probs.view(count, width, -1)).flatten(1)
            order_Nc = all_Nc.sort(dim=1, descending=True, stable=True).indices
            chosen_Nw = order_Nc[:, :width]
            ids_Nw = likely.view(count, -1).gather(1, chosen_Nw)
            scores_Nw, from_Nw = all_Nc.gather(1, chosen_Nw), chosen_Nw // width
            levels.append((ids_Nw, scores_Nw, from_Nw))
        ids, scores, parents = (torch.stack(each, dim=1) for each in zip(*levels, strict=True))
        return ids, scores, parents

    def _next_state(self, ids_N: Tensor, state_ND: Tensor) -> Tensor:
        embedding_ND: Tensor = self._target[0].embed_tokens.forward(ids_N.to(torch.int32))
        if not self.is_recurrent:
            return embedding_ND + state_ND
        return F.silu(self.rnn_w.forward(embedding_ND) + self.rnn_u.forward(state_ND))

    def _logits(self, x_NE: Tensor) -> Tensor:
        if hasattr(self, "input_proj"):
            x_NE = self.input_proj.forward(x_NE)
        for block in self.blocks:
            x_NE = x_NE + F.silu(block.forward(x_NE))
        return self.lm_head.forward(x_NE)
