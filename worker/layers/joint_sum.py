"""Row-parallel layers whose outputs are added up with one sum over the ranks."""

from __future__ import annotations

from torch import Tensor

from trimaran.worker.layers.linear import RowParallelLinear


def sum_of_products(*products: tuple[RowParallelLinear, Tensor]) -> Tensor:
    """The sum [T, D] of ``layer.forward(x)`` of all (layer, x). Collective over the group."""
    first = products[0][0]
    if first.tp.size == 1:
        return _add_up([layer.forward(x_TE) for layer, x_TE in products])
    total_TD = first.tp.all_reduce(_add_up([_share(layer, x_TE) for layer, x_TE in products]))
    for layer, _ in products:
        # After the sum: every rank holds the whole bias.
        if layer.bias is not None:
            total_TD += layer.bias
    return total_TD


def _share(layer: RowParallelLinear, x_TE: Tensor) -> Tensor:
    """This rank's addend of a layer's output, without the bias."""
    output_TD = layer.method.apply(layer, x_TE, None)
    return layer.lora.apply(x_TE, output_TD) if layer.lora.is_active else output_TD


def _add_up(outputs: list[Tensor]) -> Tensor:
    total_TD, *others = outputs
    for output_TD in others:
        total_TD += output_TD
    return total_TD
