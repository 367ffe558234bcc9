"""Token embedding and output head, with padded rows sharded over the ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.kernels.integers import IntegerProduct
from trimaran.worker.layers.linear import LayerContext, check_shape
from trimaran.worker.parallel.tensor_parallel import split


class _VocabParallel(nn.Module):
    """A shard of the rows of a [vocabulary, hidden] matrix; padding rows are zero."""

    def __init__(
        self, context: LayerContext, vocab_size: int, padded_size: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.tp = context.tp
        self.vocab_size = vocab_size
        self.num_rows = split("padded vocab_size", padded_size, self.tp.size)
        self.first_row = self.tp.rank * self.num_rows
        self.weight = context.empty(self.num_rows, hidden_size)
        self._ops = context.ops

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy this rank's rows of a whole [vocabulary, hidden] or [vocabulary] tensor."""
        check_shape(loaded, (self.vocab_size, *parameter.shape[1:]))
        mine = loaded[self.first_row : self.first_row + self.num_rows]
        parameter.data[len(mine) :].zero_()
        parameter.data[: len(mine)].copy_(mine)


class VocabParallelEmbedding(_VocabParallel):
    """Token ids to embeddings; each rank looks up its rows, and an all-reduce adds them."""

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """The tokens' embeddings [T, D], whole on every rank."""
        if self.tp.size == 1:
            return self._ops.embed(token_ids_T, self.weight)
        return self.tp.all_reduce(self._ops.embed(token_ids_T, self.weight, self.first_row))


class ScaledEmbedding(VocabParallelEmbedding):
    """Token embeddings times a constant, which is rounded to their dtype."""

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        *,
        scale: float,
    ) -> None:
        super().__init__(context, vocab_size, padded_size, hidden_size)
        self._scale = float(torch.tensor(scale, dtype=context.dtype))

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """The tokens' embeddings [T, D], whole on every rank."""
        return super().forward(token_ids_T).mul_(self._scale)


class ParallelLMHead(_VocabParallel):
    """Hidden states to logits; shares the embedding's weight when tied."""

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        *,
        tied_to: VocabParallelEmbedding | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """Logits become ``cap * tanh(logit / cap)``; 0 disables the cap."""
        if tied_to is None:
            super().__init__(context, vocab_size, padded_size, hidden_size)
        else:
            nn.Module.__init__(self)
            self.tp = context.tp
            self.vocab_size = vocab_size
            self.num_rows = tied_to.num_rows
            self.first_row = tied_to.first_row
        # In a list, so that a tied weight is not a parameter of this module too.
        self._tied = [] if tied_to is None else [tied_to]
        self._ops = context.ops
        self.integer_product: IntegerProduct | None = None
        self._soft_cap = soft_cap

    @property
    def floats(self) -> Tensor:
        """The weight of this rank as it was loaded."""
        weight: Tensor = self._tied[0].weight if self._tied else self.weight
        return weight

    def use_product(self, product: IntegerProduct) -> None:
        """Multiply by ``product`` in place of the floats from now on. A tied embedding keeps
        the floats."""
        self.integer_product = product
        if not self._tied:
            self.weight.data = self.weight.data.new_empty(0)

    def local_logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, local rows], starting at id ``first_row``; float32 or a GPU's dtype, zero
        padded."""
        if self.integer_product is None:
            logits = self._ops.logits(hidden_ND, self.floats)
        else:
            # As `Ops.logits`: rounded on a GPU alone.
            is_rounded = hidden_ND.is_cuda
            logits = self.integer_product(
                hidden_ND, None, None if is_rounded else torch.float32
            )
        if self._soft_cap:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """Logits of the whole vocabulary [N, V] on every rank; see `local_logits`."""
        logits = self.local_logits(hidden_ND)
        if self.tp.size > 1:
            logits = self.tp.all_gather(logits, -1)
        return logits[:, : self.vocab_size]


class PositionEmbedding(nn.Module):
    """Learned position embeddings, whole on every rank."""

    def __init__(self, context: LayerContext, num_positions: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = context.empty(num_positions, hidden_size)

    def forward(self, positions_T: Tensor) -> Tensor:
        """The positions' embeddings [T, D]."""
        return F.embedding(positions_T, self.weight)

    def weight_loader(self, parameter: nn.Parameter, loaded: Tensor, shard: str = "") -> None:
        """Copy the whole tensor."""
        check_shape(loaded, tuple(parameter.shape))
        parameter.data.copy_(loaded)
