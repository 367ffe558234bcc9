"""From router logits to a choice of experts and their weights, and the form of an expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """The routing rule of one model; `Ops.choose_experts` defines the result.

    Experts form ``num_groups`` groups of neighbours of equal size. With more than one group, a
    token chooses among the experts of its ``num_chosen_groups`` best groups only. A group's
    score is the sum of its ``num_ranked`` best experts.
    """

    num_chosen: int
    """Experts of a token."""

    scoring: Scoring = "softmax"
    """Softmax over all experts, or a sigmoid of each."""

    is_normalised: bool = True
    """A token's weights are divided by their sum."""

    scaling: float = 1.0
    """Factor of the final weights."""

    num_groups: int = 1
    num_chosen_groups: int = 1
    num_ranked: int = 1


@dataclass(frozen=True, slots=True)
class ExpertCounter:
    """Counters of a layer's choices."""

    counts: Tensor
    """int64 [X], tokens of each expert so far."""

    num_tokens: Tensor | None = None
    """int32 [1], on the device of the choices: the number of a step's tokens without the
    padding behind them; None if there is never padding.
    """


@dataclass(frozen=True, slots=True)
class ExpertSlotTable:
    """The slots of a layer's experts, some of which have several copies."""

    slots: Tensor
    """int32 [X, P], the slots of each expert."""

    num_copies: Tensor
    """int32 [X], the number of valid slots, which come first."""


class ExpertMatrices(NamedTuple):
    """The matrices of some experts: those that tokens choose, as stacks, or shared experts."""

    gate_up: Tensor
    """[X, E, D], gate rows above up rows; of S shared experts [2 S F, D], as of one expert."""

    down: Tensor
    """[X, D, F]; of shared experts [D, S F]."""


class MixtureInput(NamedTuple):
    """The rows of a mixture of experts before the norm in front of it."""

    addend: Tensor | None
    """[T, D], or float32 parts [parts, T, D] of it, to be added to the residual."""

    residual: Tensor
    """[T, D]."""

    norm: Tensor
    """[D], the weight of the norm of the sum."""

    eps: float


class MixtureWeights(NamedTuple):
    """The weights of a mixture of experts, all of them on one rank."""

    router: Tensor
    """[X, D]."""

    routed: ExpertMatrices
    shared: ExpertMatrices | None = None


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What an expert computes beside its products, if not SwiGLU without biases.

    An expert's result is ``down(glu) + down_bias``. With ``gate`` and ``up`` from the first
    product and its bias, gates clamped from above and ups from both sides to ``limit``,
    ``glu = gate * sigmoid(alpha * gate) * (up + 1)``, as gpt-oss defines it.
    """

    gate_up_bias: Tensor
    """[X, E], in the dtype of the model; gates before ups."""

    down_bias: Tensor
    """[X, D]; zeros on all but one of the ranks that add up an expert's shares."""

    alpha: float
    limit: float
