"""Quantized weights that are fitted to the inputs of a text, before a folder is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trimaran.builder.progress import ProgressBar
from trimaran.builder.quantization.calibration_text import (
    calibration_model,
    calibration_sequences,
)
from trimaran.builder.quantization.layer_divergence import layer_divergences
from trimaran.builder.quantization.observed_inputs import input_grams
from trimaran.builder.quantization.quantized_forms import QuantizedForm
from trimaran.comm.errors import ConfigError
from trimaran.worker.config.engine_folder import EngineFolder
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import CausalLM
from trimaran.worker.models.weights.checkpoint import mapped_file
from trimaran.worker.models.weights.parts import Part

_PASS_BYTES = 4 << 30
"""Memory for the sums over inputs: layers beyond are measured in a further pass."""

_DIVERGENCE_SEQUENCES = 1
"""Sequences of the text that the model reads once for each layer."""

Tensors = Mapping[str, list[tuple[str, Tensor]]]
"""The tensors that replace a float weight, by the weight's name in the checkpoint."""


@dataclass(frozen=True, slots=True)
class FloatWeights:
    """The weights that stay floats, since their layers are sensitive to quantization."""

    names: frozenset[str]
    """In the checkpoint."""

    bits: float
    """Bits of a weight in the mean, scales not counted."""

    share: float
    """The divergences of the quantized layers, as a part of those of all layers."""


def calibrated_weights(
    source: EngineFolder,
    parts: list[Part],
    form: QuantizedForm,
    text: str,
    max_sequences: int | None,
) -> dict[str, list[tuple[str, Tensor]]]:
    """The tensors that replace each float weight, by the weight's name in the checkpoint.

    The model of ``source``, without quantization, reads the file ``text`` (``--calib``) once
    for as many layers as fit into 4 GiB. Later passes run on the rounded weights of earlier
    ones. Experts are not among the results: few tokens of a text reach each of them.

    Raises:
        ConfigError: the file cannot be read as text, or some inputs are not finite.
    """
    sequences = calibration_sequences("--calib", text, source, max_sequences)
    model = calibration_model(source, source.config.dtype, "none")
    made: dict[str, list[tuple[str, Tensor]]] = {}
    passes = list(_passes(model, parts))
    num_tokens = len(passes) * sum(map(len, sequences))
    done = 0
    with ProgressBar(num_tokens) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, f"{done} of {num_tokens} tokens read")

        for layers in passes:
            grams = input_grams(model, layers, sequences, tell)
            for path, gram_DD in grams.items():
                if not bool(gram_DD.isfinite().all()):
                    raise ConfigError(
                        f"--calib {text}: some inputs of {path} are not finite. Check the "
                        "checkpoint's weights."
                    )
                for part in layers[path]:
                    made[part.stored.name] = _fit(model, part, form, gram_DD)
    return made


def float_weights(
    source: EngineFolder,
    parts: list[Part],
    form: QuantizedForm,
    made: Tensors,
    text: str,
    bits: float,
) -> FloatWeights:
    """The weights that stay floats so that weights have at most ``bits`` bits in the mean.

    Each linear layer is quantized alone, its inputs too, and the predictions for the beginning
    of the file ``text`` (``--calib``) are compared with those of floats. The layers whose
    predictions diverge most for their size stay floats. ``made`` are the `calibrated_weights`.

    Raises:
        ConfigError: no layer of floats fits.
    """
    sequences = calibration_sequences("--calib", text, source, _DIVERGENCE_SEQUENCES)
    model = calibration_model(source, source.config.dtype, "none")
    layers = _layers(model, parts)

    def rounded(path: str) -> dict[str, Tensor]:
        return {
            part.target.shard: form.floats([each for _, each in made[part.stored.name]])
            for part in layers[path]
        }

    num_tokens = len(layers) * sum(map(len, sequences))
    done = 0
    with ProgressBar(num_tokens, counts_bytes=False) as progress:

        def tell(count: int) -> None:
            nonlocal done
            done += count
            progress.show(done, "tokens read, each layer quantized alone")

        found = layer_divergences(
            model,
            {path: partial(rounded, path) for path in layers},
            form.round_inputs,
            sequences,
            tell,
        )
    return _choice(found, layers, parts, form.bits, bits)


def _choice(
    divergences: Mapping[str, float],
    layers: Mapping[str, list[Part]],
    parts: list[Part],
    quantized_bits: int,
    bits: float,
) -> FloatWeights:
    """The layers that diverge most for their size and fit into ``bits`` with all ``parts``."""
    sizes = {path: sum(map(_num_weights, mine)) for path, mine in layers.items()}
    num_weights = sum(map(_num_weights, parts))
    spare = (bits - quantized_bits) * num_weights
    kept: list[str] = []
    for path in sorted(layers, key=lambda path: divergences[path] / sizes[path], reverse=True):
        extra = sum(8 * part.stored.entry.num_bytes for part in layers[path])
        extra -= quantized_bits * sizes[path]
        if extra <= spare:
            kept.append(path)
            spare -= extra
    if not kept:
        raise ConfigError(
            f"--auto_quantize_bits {bits:g}: leaves no room for one layer of floats. Name a "
            "larger number."
        )
    whole = sum(divergences.values())
    return FloatWeights(
        frozenset(part.stored.name for path in kept for part in layers[path]),
        bits - spare / num_weights,
        (whole - sum(divergences[path] for path in kept)) / (whole or 1.0),
    )


def _num_weights(part: Part) -> int:
    return math.prod(part.stored.entry.shape)


def _layers(model: CausalLM, parts: list[Part]) -> dict[str, list[Part]]:
    """The parts of linear layers by the layer's name, in the model's order."""
    of_layers: dict[str, list[Part]] = {}
    for part in parts:
        of_layers.setdefault(part.target.parameter.rpartition(".")[0], []).append(part)
    return {
        path: of_layers[path]
        for path, module in model.named_modules()
        if path in of_layers and isinstance(module, ParallelLinear)
    }


def _passes(model: CausalLM, parts: list[Part]) -> Iterator[dict[str, list[Part]]]:
    """The layers whose sums over inputs are in memory at a time."""
    chosen: dict[str, list[Part]] = {}
    num_bytes = 0
    for path, mine in _layers(model, parts).items():
        layer = model.get_submodule(path)
        assert isinstance(layer, ParallelLinear)
        needed = 4 * layer.weight.shape[1] ** 2
        if chosen and num_bytes + needed > _PASS_BYTES:
            yield chosen
            chosen, num_bytes = {}, 0
        chosen[path] = mine
        num_bytes += needed
    if chosen:
        yield chosen


@torch.inference_mode()
def _fit(
    model: CausalLM, part: Part, form: QuantizedForm, gram_DD: Tensor
) -> list[tuple[str, Tensor]]:
    """Round one weight, also in the model."""
    with mapped_file(part.stored.path) as tensor_of:
        floats = tensor_of(part.stored.name)
    made = form.tensors(part.stored.name, floats, gram_DD)
    path, _, name = part.target.parameter.rpartition(".")
    layer = model.get_submodule(path)
    assert isinstance(layer, ParallelLinear)
    rounded = form.floats([tensor for _, tensor in made])
    layer.weight_loader(getattr(layer, name), rounded.to(layer.weight), part.target.shard)
    return made
