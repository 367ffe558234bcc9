"""What attention kernels are told: where a step's tokens stand, and which keys they see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

# Shapes: T tokens of the step, S sequences of the step, R rows, M blocks of the longest
# sequence, B tokens of a block.


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Which keys a query sees, and how its scores are formed. The same for all of a layer."""

    scale: float
    """Factor of the products of queries and keys."""

    window: int = 0
    """Tokens a query looks back at, itself included; 0 means all."""

    num_sinks: int = 0
    """First tokens of a sequence that are seen whatever the window."""

    soft_cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0 leaves them."""

    latent_size: int = 0
    """The cache holds one latent vector a token, a key whose first dims, so many, are its
    value; 0 means that it holds keys and values apart."""

    position_bias: Tensor | None = field(default=None, repr=False)
    """float32 [N, P], dense in P: what a head's scores of the key at a position are raised by
    after ``scale``; None for nothing. P is no less than the tokens of any sequence."""

    def __post_init__(self) -> None:
        if self.position_bias is not None and (self.soft_cap or self.latent_size):
            raise ValueError(
                f"attention takes no position_bias with a soft_cap ({self.soft_cap}) or a "
                f"latent_size ({self.latent_size}). Leave out the bias."
            )
        if min(self.window, self.num_sinks, self.soft_cap, self.latent_size) < 0:
            raise ValueError(
                f"attention takes window ({self.window}), num_sinks ({self.num_sinks}), "
                f"soft_cap ({self.soft_cap}) and latent_size ({self.latent_size}) from 0 on. "
                "Set what is not wanted to 0."
            )


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What makes keys and values of latent vectors of L dims, for N heads of this rank."""

    key_up: Tensor
    """[N, L, P]: a head's key, but for its rotated dims, is the vector times this."""

    value_up: Tensor
    """[N, V, L]: a head's value is this times the vector."""


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """Where the tokens of one step stand in their sequences and in the KV cache.

    Tensors are on the model's device; the integers are upper bounds known to the host, so
    that no kernel waits for the device.
    """

    query_start_loc: Tensor
    """int32 [S + 1]: sequence s owns the step's tokens ``[loc[s], loc[s + 1])``."""

    seq_lens: Tensor
    """int32 [S]: tokens of the sequence in the cache after this step."""

    block_tables: Tensor
    """int32 [S, M], or [R, M] with ``rows``: blocks of each sequence; entries beyond its
    length are ignored."""

    slot_mapping: Tensor
    """int64 [T]: ``block * B + offset`` that each token's KV goes to."""

    max_query_len: int
    max_seq_len: int

    num_decodes: int = 0
    """How many leading sequences have exactly one query token. 0 is always right; the
    true number lets a kernel treat decodes and prompt chunks apart."""

    has_past: bool = True
    """Whether a sequence behind the decodes may have tokens from before this step. True is
    always right."""

    rows: Tensor | None = None
    """int32 [S]: sequence s has the blocks ``block_tables[rows[s]]``; None: row s."""

    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """What kernels made of this step for the layers behind the first, by their settings."""

    def parts(self) -> list[tuple[slice, AttentionMetadata]]:
        """The decodes, and the chunks of prompts behind them, where there are any of these;
        each with its tokens. Padding behind the last sequence goes with the last part."""
        num_decodes, num_sequences = self.num_decodes, self.seq_lens.shape[0]
        ends = sorted({0, num_decodes, num_sequences})
        return [self._part(first, end) for first, end in pairwise(ends)]

    def _part(self, first: int, end: int) -> tuple[slice, AttentionMetadata]:
        # Each sequence before the first is a decode, which has one token.
        is_decode = end <= self.num_decodes
        tokens = slice(first, None if end == self.seq_lens.shape[0] else end)
        part = AttentionMetadata(
            query_start_loc=self.query_start_loc[first : end + 1] - first,
            seq_lens=self.seq_lens[first:end],
            block_tables=self.block_tables
            if self.rows is not None
            else self.block_tables[first:end],
            slot_mapping=self.slot_mapping[tokens],
            max_query_len=1 if is_decode else self.max_query_len,
            max_seq_len=self.max_seq_len,
            num_decodes=end - first if is_decode else 0,
            has_past=self.has_past,
            rows=None if self.rows is None else self.rows[first:end],
        )
        return tokens, part

    def tables(self) -> Tensor:
        """The block table of each sequence of the step, [S, M]."""
        if self.rows is None:
            return self.block_tables
        return self.block_tables.index_select(0, self.rows)
