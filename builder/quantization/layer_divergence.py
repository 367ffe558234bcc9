"""How much the predictions of a model change when a linear layer is quantized alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trimaran.builder.quantization.kv_calibration import read_sequence
from trimaran.builder.quantization.observed_inputs import InputMethod
from trimaran.worker.layers.linear import ParallelLinear
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width, V entries of the vocabulary.

Rounding = Callable[[Tensor], Tensor]
"""Floats [T, D] to the floats that their quantized numbers stand for."""


@torch.inference_mode()
def layer_divergences(
    model: CausalLM,
    layers: Mapping[str, Callable[[], Mapping[str, Tensor]]],
    round_inputs: Rounding,
    sequences: Sequence[list[int]],
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, float]:
    """The mean Kullback-Leibler divergence, in nats a token, from the predictions of the model
    to those of the model with one layer quantized, for each of the linear ``layers``.

    ``model`` is a whole model of floats. A value of ``layers`` gives the rounded matrices of
    the layer by shard. Each sequence of ids is read alone, in one step. ``tell`` hears of the
    number of tokens of each.
    """
    found: dict[str, float] = {}
    with model.unfused():
        expected = [_log_probabilities(model, ids) for ids in sequences]
        for path, rounded in layers.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, ParallelLinear)
            total, count = 0.0, 0
            with _quantized(layer, rounded(), round_inputs):
                for ids, expected_TV in zip(sequences, expected, strict=True):
                    found_TV = _log_probabilities(model, ids)
                    total += float((expected_TV.exp() * (expected_TV - found_TV)).sum())
                    count += len(ids)
                    tell(len(ids))
            found[path] = total / count
    return found


def _log_probabilities(model: CausalLM, ids: list[int]) -> Tensor:
    """Float32 [T, V]: those of the token behind each token."""
    hidden_TD, _ = read_sequence(model, ids)
    logits_TV = model.compute_logits(hidden_TD)[:, : model.config.vocab_size]
    return logits_TV.float().log_softmax(-1)


@contextmanager
def _quantized(
    layer: ParallelLinear, rounded: Mapping[str, Tensor], round_inputs: Rounding
) -> Iterator[None]:
    weight, method = layer.weight.detach().clone(), layer.method
    try:
        for shard, matrix in rounded.items():
            layer.weight_loader(layer.weight, matrix.to(layer.weight), shard)
        layer.method = InputMethod(method, lambda x_TD: round_inputs(x_TD).to(x_TD.dtype))
        yield
    finally:
        layer.method = method
        layer.weight.data.copy_(weight)
