"""How a router's numbers become a choice of experts and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """The rule of one model; `Ops.choose_experts` says what it computes.

    Experts are ``num_groups`` groups of neighbours, all of a size. Where that is more than
    one, a token chooses among the experts of its ``num_chosen_groups`` best groups alone: the
    best by the sum of their ``num_ranked`` best experts.
    """

    num_chosen: int
    """Experts of a token."""

    scoring: Scoring = "softmax"
    """Over all experts, or a sigmoid of each."""

    is_normalised: bool = True
    """A token's weights are divided by their sum."""

    scaling: float = 1.0
    """What weights are multiplied by in the end."""

    num_groups: int = 1
    num_chosen_groups: int = 1
    num_ranked: int = 1


@dataclass(frozen=True, slots=True)
class ExpertCounter:
    """Where a layer's choices are counted."""

    counts: Tensor
    """int64 [X], tokens of each expert so far."""

    num_tokens: Tensor | None = None
    """int32 [1], where the choices are made: how many of a step's tokens are real, behind
    which stand those that pad it; None if none ever do."""


@dataclass(frozen=True, slots=True)
class PlaceTable:
    """Where a layer's experts are, some at several places."""

    places: Tensor
    """int32 [X, P], the numbers of each expert's places."""

    num_copies: Tensor
    """int32 [X], how many of those count, from the first on."""
