"""Inputs of attention kernels: the positions of a step's tokens, and the keys they see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor

# Shapes: T tokens of the step, S sequences of the step, R rows, M blocks of the longest
# sequence, B tokens of a block.


TREE_BITS = 64
"""Keys that a mask of a tree of drafts covers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Which keys a query sees, and the form of its scores. Equal for all tokens of a layer."""

    scale: float
    """Factor of the products of queries and keys."""

    window: int = 0
    """Keys that a query sees, its own token the last; 0 means all."""

    num_sinks: int = 0
    """Sinks: first tokens of a sequence that every query sees, regardless of the window."""

    soft_cap: float = 0.0
    """Scores become ``cap * tanh(score / cap)``; 0 disables the cap."""

    latent_size: int = 0
    """The cache holds one latent vector for each token, a key whose first dims, this many,
    are the value; 0 means that keys and values are separate.
    """

    position_bias: Tensor | None = field(default=None, repr=False)
    """float32 [N, P], dense in P: added to a head's scores of the key at a position after
    ``scale``; None for no bias. P is at least the tokens of any sequence.
    """

    kv_scales: Tensor | None = field(default=None, repr=False)
    """float32 [4, K] of `kv_quantization.head_scales` for a cache of one byte a number; None
    for a cache in the dtype of queries.
    """

    sink_logits: Tensor | None = field(default=None, repr=False)
    """float32 [N]: a head's learned score of no key, in the denominator of its softmax alone
    (gpt-oss); None for a softmax over keys. Unlike ``num_sinks``, no token stands behind it.
    """

    def __post_init__(self) -> None:
        if self.sink_logits is not None and self.latent_size:
            raise ValueError(
                f"attention takes no sink_logits with a latent_size ({self.latent_size}). "
                "Leave out the logits."
            )
        if self.kv_scales is not None and self.latent_size:
            raise ValueError(
                f"attention takes no kv_scales with a latent_size ({self.latent_size}). Leave "
                "out the scales."
            )
        if self.position_bias is not None and (self.soft_cap or self.latent_size):
            raise ValueError(
                f"attention takes no position_bias with a soft_cap ({self.soft_cap}) or a "
                f"latent_size ({self.latent_size}). Leave out the bias."
            )
        if min(self.window, self.num_sinks, self.soft_cap, self.latent_size) < 0:
            raise ValueError(
                f"attention takes window ({self.window}), num_sinks ({self.num_sinks}), "
                f"soft_cap ({self.soft_cap}) and latent_size ({self.latent_size}) from 0 on. "
                "Set unused fields to 0."
            )


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The projections from latent vectors of L dims to keys and values, for N heads of this
    rank.
    """

    key_up: Tensor
    """[N, L, P]: the vector times this is a head's key without its rotated dims."""

    value_up: Tensor
    """[N, V, L]: this times the vector is a head's value."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of query and key heads; see `Ops.norm_heads`."""

    query: Tensor
    """[H], the weight for queries."""

    key: Tensor
    """[H], the weight for keys."""

    eps: float


@dataclass(frozen=True, slots=True)
class LatentRows:
    """The products of a step's tokens from which latent attention begins."""

    query: Tensor
    """[T, N, H], of whose dims the last R are to be rotated."""

    latent: Tensor
    """[T, L], to be normalised."""

    key: Tensor
    """[T, R], to be rotated: all heads share it."""

    norm: Tensor
    """[L], the weight of the norm of latent vectors."""

    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of a step's tokens; see `Ops.rope_and_cache`."""

    cos_sin: Tensor
    """float32 [P, R]."""

    positions: Tensor
    """int64 [T]."""

    is_neox: bool


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """The positions of one step's tokens in their sequences and in the KV cache.

    Tensors are on the model's device. The integers are upper bounds known to the host, so that
    no kernel waits for the device.
    """

    query_start_loc: Tensor
    """int32 [S + 1]: sequence s owns the step's tokens ``[loc[s], loc[s + 1])``."""

    seq_lens: Tensor
    """int32 [S]: tokens of the sequence in the cache after this step."""

    block_tables: Tensor
    """int32 [S, M], or [R, M] with ``rows``: blocks of each sequence; entries beyond its
    length are ignored."""

    slot_mapping: Tensor
    """int64 [T]: ``block * B + offset``, the slot of each token's KV."""

    max_query_len: int
    max_seq_len: int

    num_decodes: int = 0
    """Number of leading sequences with exactly one query token. 0 is always valid; the exact
    number lets a kernel treat decodes and prompt chunks separately.
    """

    has_past: bool = True
    """Whether a sequence behind the decodes may have tokens from earlier steps. True is
    always valid.
    """

    rows: Tensor | None = None
    """int32 [S]: sequence s has the blocks ``block_tables[rows[s]]``; None: row s."""

    shares_rows: bool = False
    """Whether decodes may be of one sequence: then keys and values of all tokens are stored
    before any query attends."""

    tree_masks: Tensor | None = None
    """int64 [S]: bit i says whether a decode sees the key i slots before its own, for the last
    64 keys up to its own; earlier keys are all seen. None or -1: all keys, as in a chain. A
    token's position is its slot without the keys that it does not see. Entries behind the
    decodes mean nothing.
    """

    plans: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Plans that kernels made for this step, by their settings; later layers reuse them."""

    def parts(self) -> list[tuple[slice, AttentionMetadata]]:
        """The decodes, and the prompt chunks behind them, without empty parts; each with its
        tokens. Padding behind the last sequence belongs to the last part.
        """
        num_decodes, num_sequences = self.num_decodes, self.seq_lens.shape[0]
        ends = sorted({0, num_decodes, num_sequences})
        return [self._part(first, end) for first, end in pairwise(ends)]

    def _part(self, first: int, end: int) -> tuple[slice, AttentionMetadata]:
        # Each sequence before the first prompt chunk is a decode, with one token.
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
            shares_rows=self.shares_rows,
            tree_masks=self.tree_masks[first:end] if self.tree_masks is not None else None,
        )
        return tokens, part

    def tables(self) -> Tensor:
        """The block table of each sequence of the step, [S, M]."""
        if self.rows is None:
            return self.block_tables
        return self.block_tables.index_select(0, self.rows)
