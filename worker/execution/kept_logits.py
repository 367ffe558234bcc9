"""Logits that clients want to see: of which rows, and on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trimaran.worker.steps.step_types import KeptLogits, NewRow, SchedulerOutput

# Shapes: T tokens of the step, N sampled rows, P tokens of a prompt, V vocabulary.

_PIECE_BYTES = 32 << 20
"""Logits of a prompt that are on the device at once, as float32."""


@dataclass(slots=True)
class _Context:
    dtype: torch.dtype
    pieces: list[Tensor] = field(default_factory=list)


class LogitsRows:
    """The rows whose logits are kept. A step without any of them costs nothing here.

    Logits are computed on every rank, for their shards must be gathered; rank 0 of the
    tensor group keeps them.
    """

    def __init__(self, max_rows: int, vocab_size: int, *, is_keeper: bool) -> None:
        self._context: dict[int, _Context] = {}
        self._generation: dict[int, torch.dtype] = {}
        self._is_keeper = is_keeper
        # No more rows than a step's sampling has memory for.
        self._piece_rows = max(1, min(max_rows, _PIECE_BYTES // (4 * vocab_size)))

    @property
    def is_empty(self) -> bool:
        """Whether no row wants logits."""
        return not self._context and not self._generation

    def enter(self, new: NewRow) -> None:
        """Note what a row's new occupant wants."""
        wants = new.sampling
        dtype: torch.dtype = getattr(torch, wants.get("logits_dtype", "float32"))
        if wants.get("return_generation_logits"):
            self._generation[new.row] = dtype
        # What comes back with output has told its prompt's logits before.
        if wants.get("return_context_logits") and len(new.token_ids) == new.num_prompt_tokens:
            self._context[new.row] = _Context(dtype)

    def leave(self, row: int) -> None:
        """The row's occupant is gone."""
        self._context.pop(row, None)
        self._generation.pop(row, None)

    def keep_context(
        self,
        decision: SchedulerOutput,
        hidden_TD: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        kept: KeptLogits,
    ) -> None:
        """Compute the logits of prompt tokens in this step. Collective over the group.

        They are kept until the prompt is complete, which is when they go to ``kept``.
        """
        if not self._context:
            return
        starts = np.cumsum(decision.num_scheduled_tokens) - decision.num_scheduled_tokens
        index_of = {int(entry): index for index, entry in enumerate(decision.sampled)}
        for entry, row in enumerate(decision.rows.tolist()):
            context = self._context.get(row)
            if context is None:
                continue
            first = int(starts[entry])
            end = first + int(decision.num_scheduled_tokens[entry])
            for start in range(first, end, self._piece_rows):
                logits = compute_logits(hidden_TD[start : min(start + self._piece_rows, end)])
                if self._is_keeper:
                    context.pieces.append(_to_host(logits, context.dtype))
            if entry in index_of:
                kept.context[index_of[entry]] = context.pieces
                del self._context[row]

    def keep_generation(
        self, decision: SchedulerOutput, logits_NV: Tensor, kept: KeptLogits
    ) -> None:
        """Keep the logits from which this step samples, as the model left them."""
        if not self._generation or not self._is_keeper:
            return
        for index, row in enumerate(decision.rows[decision.sampled].tolist()):
            dtype = self._generation.get(row)
            if dtype is not None:
                kept.generation[index] = _to_host(logits_NV[index], dtype)


def _to_host(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy on the host, there once the device has come so far."""
    if not logits.is_cuda:
        return logits.to(dtype, copy=True)
    # On the step's own stream: a copy that lagged behind would hold the device's memory.
    host = torch.empty(logits.shape, dtype=dtype, pin_memory=True)
    return host.copy_(logits.to(dtype), non_blocking=True)
