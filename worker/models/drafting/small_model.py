"""An ordinary language model, smaller than the target, as a network that drafts."""

from __future__ import annotations

from torch import Tensor

from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec
from trimaran.worker.models.drafting.likeliest import likeliest_ids, likely_ids, likely_scores
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, N sequences, D hidden size of the small model.


class SmallModel:
    """The whole small model on each tensor rank's shard; it reads the tokens alone."""

    taps: tuple[int, ...] = ()
    state_size = 0
    needs_states = False
    is_shifted = False

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One entry a layer of the small model."""
        return self.model.kv_cache_specs()

    def forward(
        self,
        token_ids_T: Tensor,
        states_TX: Tensor | None,
        positions_T: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """See `ChainNetwork.forward`; ``states`` are unused."""
        return self.model.forward(token_ids_T, positions_T, context)

    def draft_ids(self, states_ND: Tensor) -> Tensor:
        """See `ChainNetwork.draft_ids`."""
        return likeliest_ids(self.model.compute_logits(states_ND))

    def likely_ids(self, states_ND: Tensor, count: int) -> Tensor:
        """See `RankedNetwork.likely_ids`."""
        return likely_ids(self.model.compute_logits(states_ND), count)

    def likely_scores(self, states_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `RankedNetwork.likely_scores`."""
        return likely_scores(self.model.compute_logits(states_ND), count)
