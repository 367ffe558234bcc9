"""Interfaces of networks that draft, for the rank that runs one after the target's step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from trimaran.worker.attention.backend import ForwardContext, KVCacheSpec

# Shapes: T tokens, N sequences, D hidden size of the network, X width of its inputs.


class DraftNetwork(Protocol):
    """What the two kinds of networks have in common."""

    taps: tuple[int, ...]
    """The target's layers whose inputs are the network's; empty for none."""

    state_size: int
    """Dims of the hidden states from which the first draft follows; 0 for none."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One entry a layer of the network; empty if it has no cache."""
        ...


@runtime_checkable
class ChainNetwork(DraftNetwork, Protocol):
    """A network that drafts one token after another, with one cache entry a token, beside the
    target's and in blocks of the same numbers.

    It runs over all tokens of each step of the target, whose cache is complete therefore. Then
    a chain of single tokens follows for each sequence that wants drafts.
    """

    needs_states: bool
    """Whether the target's last hidden states of all tokens are the network's inputs."""

    is_shifted: bool
    """Whether the network computes at each position the token behind it, together with the
    position's hidden state."""

    def forward(
        self,
        token_ids_T: Tensor,
        states_TX: Tensor | None,
        positions_T: Tensor,
        context: ForwardContext,
    ) -> Tensor:
        """Run all layers. Returns hidden states [T, D], which are the inputs of a chain's next
        token.

        ``states`` are taps [T, taps * target's hidden size], last hidden states, or [T, D] of
        the network itself. Collective over the tensor group.
        """
        ...

    def draft_ids(self, states_ND: Tensor) -> Tensor:
        """The likeliest ids of the target's vocabulary, int64 [N]. Collective."""
        ...


@runtime_checkable
class RankedNetwork(ChainNetwork, Protocol):
    """A network that may draft trees."""

    def likely_ids(self, states_ND: Tensor, count: int) -> Tensor:
        """The ``count`` likeliest ids of the target's vocabulary, the likeliest first, int64
        [N, count]. Collective."""
        ...

    def likely_scores(self, states_ND: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ids of `likely_ids`, and the logarithms of their probabilities, float32 [N,
        count]. Collective."""
        ...


@runtime_checkable
class CachelessHeads(DraftNetwork, Protocol):
    """Heads that draft from the target's state and the token behind the state. They have no
    cache."""

    num_heads: int
    """Most tokens that `propose` makes."""

    def propose(self, states_NX: Tensor, next_ids_N: Tensor, count: int) -> Tensor:
        """The ids at the ``count`` positions behind the ids that the target has sampled, int64
        [N, count]. Collective."""
        ...


@runtime_checkable
class BeamHeads(CachelessHeads, Protocol):
    """Heads that draft by a search for the likeliest paths."""

    def propose_beams(
        self, states_NX: Tensor, next_ids_N: Tensor, width: int, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A beam search: the ids of ``width`` beams at each of ``depth`` positions, the
        logarithms of the probabilities of their paths, float32, and the beam at the position
        before that each continues; [N, depth, width], and int64 but for the logarithms.
        Collective."""
        ...


@runtime_checkable
class RankedHeads(CachelessHeads, Protocol):
    """Heads that draft each position by itself, and therefore may draft trees."""

    def propose_ranks(self, states_NX: Tensor, widths: list[int]) -> Tensor:
        """The likeliest ids at the position of each head, as many as ``widths`` says of the
        head, side by side, int64 [N, sum of widths]. Collective."""
        ...
