"""An output head with a bias."""

from __future__ import annotations

from torch import Tensor

from trimaran.worker.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from trimaran.worker.layers.linear import LayerContext


class BiasedLMHead(ParallelLMHead):
    """Hidden states to logits plus a bias, which is cut like the rows of the weight."""

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        super().__init__(context, vocab_size, padded_size, hidden_size, tied_to=tied_to)
        self.bias = context.empty(self.num_rows)

    def local_logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, local rows] from id ``first_row`` on, float32 or the GPU's dtype; zero padded."""
        return super().local_logits(hidden_ND).add_(self.bias)
