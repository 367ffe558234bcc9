"""SmoothQuant: large channels of inputs become factors of weights, which have no outliers.

Source: Xiao et al., 2022, https://arxiv.org/abs/2211.10438.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimaran.builder.quantization.channel_folds import (
    NormFold,
    ProductFold,
    norm_folds,
    product_folds,
)
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.weights.checkpoint import mapped_file
from trimaran.worker.models.weights.parts import Part

# Shapes: D inputs, E outputs of a weight.

_LEAST_FACTOR = 1e-5
"""Factors below would make weights of zeros."""


@dataclass(slots=True)
class Smoothing:
    """What becomes of a checkpoint's floats; keys are the names of its tensors."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    """Float32 [D]: factors of a weight's inputs."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    """Float32 [E]: divisors of a weight's outputs."""

    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Norms and biases, in the dtype of the checkpoint."""

    peaks: dict[str, float] = field(default_factory=dict)
    """The largest magnitude of a weight's inputs, once they are smoothed."""

    def floats(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor ``name`` as it shall be: float32 if it is a weight with factors."""
        if name in self.replaced:
            return self.replaced[name]
        columns, rows = self.columns.get(name), self.rows.get(name)
        if columns is not None:
            tensor = tensor.float() * columns
        return tensor if rows is None else tensor.float() / rows[:, None]


def channel_factors(peaks_D: Tensor, weights_D: Tensor, strength: float) -> Tensor:
    """Float32 [D]: ``peak**strength / weight**(1 - strength)`` of the largest magnitudes of
    inputs and weights; 1 where one of the two is zero."""
    factors = peaks_D.pow(strength) / weights_D.pow(1 - strength)
    is_used = (peaks_D > 0) & (weights_D > 0)
    return torch.where(is_used, factors.clamp_min(_LEAST_FACTOR), 1.0)


def smoothing(
    model: CausalLM,
    parts: list[Part],
    peaks: Mapping[str, Tensor],
    strength: float,
    *,
    through_products: bool,
) -> Smoothing:
    """The changes of a checkpoint by which inputs of products lose their large channels.

    ``parts`` say what of the checkpoint fills the float ``model``, and ``peaks`` are its
    `input_peaks`. Norms give their factors to the layers behind. With ``through_products`` the
    values of attention and the ups of gated MLPs do so too, for output and down products: the
    rows of their weights then differ in size, so that each needs a scale of its own.

    Raises:
        ConfigError: the model's layers are not known (`norm_folds`).
    """
    made = Smoothing()
    tensors = _Tensors(parts)
    for path, mine in peaks.items():
        for part in tensors.of(f"{path}.weight"):
            made.peaks[part.stored.name] = float(mine.max())
    for fold in norm_folds(model):
        _fold_norm(model, tensors, peaks, strength, fold, made)
    for each in product_folds(model) if through_products else ():
        _fold_product(model, tensors, peaks, strength, each, made)
    return made


class _Tensors:
    """The tensors of a checkpoint that fill a parameter."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.target.parameter, []).append(part)

    def of(self, parameter: str) -> list[Part]:
        """The parts of a parameter; none if the model has no such parameter."""
        return self._parts.get(parameter, [])

    def read(self, parameter: str) -> Iterator[tuple[Part, Tensor]]:
        """The parts and their tensors."""
        for part in self.of(parameter):
            with mapped_file(part.stored.path) as tensor_of:
                yield part, tensor_of(part.stored.name)

    def largest(self, layers: tuple[str, ...]) -> Tensor:
        """Float32 [D]: the largest magnitudes of the inputs of layers' weights."""
        every = [
            tensor.float().abs().amax(0)
            for path in layers
            for _, tensor in self.read(f"{path}.weight")
        ]
        return torch.stack(every).amax(0)


def _fold_norm(
    model: CausalLM,
    tensors: _Tensors,
    peaks: Mapping[str, Tensor],
    strength: float,
    fold: NormFold,
    made: Smoothing,
) -> None:
    peaks_D = torch.stack([peaks[path] for path in fold.layers]).amax(0)
    wanted_D = channel_factors(peaks_D, tensors.largest(fold.layers), strength)
    offset = float(getattr(model.get_submodule(fold.norm), "offset", 0.0))
    factors_D = wanted_D
    for part, stored_D in tensors.read(f"{fold.norm}.weight"):
        before_D = (stored_D.float() + offset).to(model.dtype).float()
        divided_D = (before_D / wanted_D - offset).to(stored_D.dtype)
        after_D = (divided_D.float() + offset).to(model.dtype).float()
        # The columns take what the rounded norm has lost in fact, and nothing from a channel
        # that would vanish.
        is_kept = (after_D == 0) | ~after_D.isfinite()
        made.replaced[part.stored.name] = torch.where(is_kept, stored_D, divided_D)
        factors_D = torch.where(is_kept, 1.0, before_D / after_D)
    for part, bias_D in tensors.read(f"{fold.norm}.bias"):
        made.replaced[part.stored.name] = (bias_D.float() / factors_D).to(bias_D.dtype)
    _multiply_columns(tensors, fold.layers, factors_D, peaks, made)


def _fold_product(
    model: CausalLM,
    tensors: _Tensors,
    peaks: Mapping[str, Tensor],
    strength: float,
    fold: ProductFold,
    made: Smoothing,
) -> None:
    source = model.get_submodule(fold.source)
    assert isinstance(source, ParallelLinear)
    sources = tensors.of(f"{fold.source}.weight")
    if not any(part.target.shard in ("*", fold.part) for part in sources):
        # The heads of one tensor hold queries, keys and values in turn.
        return
    blocks = -1, fold.repeats, fold.width
    largest_D = tensors.largest((fold.layer,))
    factors_E = channel_factors(
        peaks[fold.layer].view(blocks).amax(1).flatten(),
        largest_D.view(blocks).amax(1).flatten(),
        strength,
    )
    place = source.output_parts[fold.part]
    whole_E = torch.ones(sum(each.partition.whole for each in source.output_parts.values()))
    whole_E[place.offset : place.offset + place.partition.whole] = factors_E
    divisors = {"*": whole_E, fold.part: factors_E}
    for part in sources:
        if part.target.shard in divisors:
            made.rows[part.stored.name] = divisors[part.target.shard]
    for part, bias_E in tensors.read(f"{fold.source}.bias"):
        if part.target.shard in divisors:
            divided_E = bias_E.float() / divisors[part.target.shard]
            made.replaced[part.stored.name] = divided_E.to(bias_E.dtype)
    spread_D = factors_E.view(-1, 1, fold.width).expand(-1, fold.repeats, -1).flatten()
    _multiply_columns(tensors, (fold.layer,), spread_D, peaks, made)


def _multiply_columns(
    tensors: _Tensors,
    layers: tuple[str, ...],
    factors_D: Tensor,
    peaks: Mapping[str, Tensor],
    made: Smoothing,
) -> None:
    for path in layers:
        for part in tensors.of(f"{path}.weight"):
            made.columns[part.stored.name] = factors_D
            made.peaks[part.stored.name] = float((peaks[path] / factors_D).max())
