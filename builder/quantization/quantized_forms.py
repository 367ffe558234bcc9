"""The formats of quantized folders: the tensors that replace a float tensor, and their
description.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels import byte_reference, integer_reference
from trimaran.worker.config.schemes import Fp8Scheme, IntegerScheme, Layout
from trimaran.worker.config.shard_file import TensorEntry
from trimaran.worker.models.weights.checkpoint import FP8_WORD
from trimaran.worker.quantization.calibrated_rounding import (
    fit_integers,
    fp8_scales,
    round_to_inputs,
)
from trimaran.worker.quantization.integer_formats import WEIGHT, WEIGHT_SCALE, dequantized

_FLOATS = {"num_bits": 8, "type": "float", "symmetric": True}
_WORD_BITS = 32


class QuantizedForm(Protocol):
    """One format of weights."""

    numbers: str
    """What the weights become, for the last line of the command."""

    bits: int
    """Bits of a weight, scales not counted."""

    def entries(self, name: str, entry: TensorEntry) -> dict[str, tuple[str, list[int]]]:
        """Types and shapes of the tensors that replace the float matrix ``name``.

        Raises:
            ConfigError: the format has no such shape.
        """
        ...

    def tensors(
        self, name: str, floats: Tensor, gram_DD: Tensor | None = None
    ) -> list[tuple[str, Tensor]]:
        """These tensors; with the sum of ``x.T @ x`` of its inputs (`input_grams`) fitted to
        those."""
        ...

    def floats(self, tensors: list[Tensor]) -> Tensor:
        """Float32 numbers [E, D] that the values and scales of `tensors` stand for."""
        ...

    def round_inputs(self, x_TD: Tensor) -> Tensor:
        """Inputs of products as they are multiplied."""
        ...

    def description(self, kept: list[str]) -> dict[str, Any]:
        """The ``quantization_config``; ``kept`` are the modules that stay floats."""
        ...


class Fp8Form:
    """FP8: compressed-tensors' ``float-quantized`` with a scale a row, or transformers' ``fp8``
    with blocks."""

    numbers = "FP8"
    bits = 8

    def __init__(self, scheme: Fp8Scheme) -> None:
        self._block = scheme.block

    def entries(self, name: str, entry: TensorEntry) -> dict[str, tuple[str, list[int]]]:
        """See `QuantizedForm`."""
        rows, columns = self._block or (1, entry.shape[1])
        shape = [-(-entry.shape[0] // rows), -(-entry.shape[1] // columns)]
        return {name: (FP8_WORD, list(entry.shape)), self._scale_of(name): ("F32", shape)}

    def tensors(
        self, name: str, floats: Tensor, gram_DD: Tensor | None = None
    ) -> list[tuple[str, Tensor]]:
        """See `QuantizedForm`."""
        if gram_DD is None:
            values, scales = byte_reference.quantize_weight(floats, self._block)
        else:
            floats = floats.to(gram_DD.device)
            scales = fp8_scales(floats, self._block, gram_DD.diagonal())
            spread = byte_reference.spread_scales(scales, tuple(floats.shape), self._block)
            rounded = round_to_inputs(floats, gram_DD, spread, _fp8_grid)
            values = byte_reference.to_fp8(rounded, spread)
        return [(name, values.cpu()), (self._scale_of(name), scales.cpu())]

    def floats(self, tensors: list[Tensor]) -> Tensor:
        """See `QuantizedForm`."""
        values, scales = tensors
        return byte_reference.dequantize_weight(values, scales, self._block, torch.float32)

    def round_inputs(self, x_TD: Tensor) -> Tensor:
        """FP8 numbers with a scale a token, or a group of inputs as large as a block's."""
        inner = x_TD.shape[1]
        size = inner if self._block is None else self._block[1]
        groups = torch.nn.functional.pad(x_TD, (0, -inner % size))
        groups = groups.view(len(x_TD), -1, size)
        scales = byte_reference.scales_of(groups.abs().amax(-1, keepdim=True))
        return _fp8_grid(groups, scales).flatten(1)[:, :inner]

    def description(self, kept: list[str]) -> dict[str, Any]:
        """See `QuantizedForm`."""
        if self._block is not None:
            return {
                "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                "weight_block_size": list(self._block), "modules_to_not_convert": kept,
            }  # fmt: skip
        inputs = {**_FLOATS, "strategy": "token", "dynamic": True}
        weights = {**_FLOATS, "strategy": "channel", "dynamic": False}
        return compressed("float-quantized", weights, inputs, kept)

    def _scale_of(self, name: str) -> str:
        return f"{name}_scale{'' if self._block is None else '_inv'}"


class PackedForm:
    """Integers: compressed-tensors' ``pack-quantized``, symmetric, with scales in bf16."""

    def __init__(self, scheme: IntegerScheme) -> None:
        self._scheme = replace(scheme, layout=Layout.PACKED)
        self.bits = scheme.bits
        self.numbers = f"INT{scheme.bits}"

    def entries(self, name: str, entry: TensorEntry) -> dict[str, tuple[str, list[int]]]:
        """See `QuantizedForm`."""
        outputs, inner = entry.shape
        size, bits = self._scheme.group_size or inner, self._scheme.bits
        if inner % size:
            raise ConfigError(
                f"the weight {name!r} has {inner} inputs, which groups of {size} do not "
                "divide. Name --quantization int4_g64, int4_g32 or int8, or serve the folder "
                "with --quantization int4, whose last group may be smaller."
            )
        return {
            f"{name}_packed": ("I32", [outputs, -(-inner * bits // _WORD_BITS)]),
            f"{name}_scale": ("BF16", [outputs, inner // size]),
            f"{name}_shape": ("I64", [2]),
        }

    def tensors(
        self, name: str, floats: Tensor, gram_DD: Tensor | None = None
    ) -> list[tuple[str, Tensor]]:
        """See `QuantizedForm`."""
        bits, size = self._scheme.bits, self._scheme.group_size
        if gram_DD is None:
            integers, scales = integer_reference.quantize_weight(floats, bits, size)
        else:
            integers, scales = fit_integers(floats.to(gram_DD.device), bits, size, gram_DD)
        return [
            (f"{name}_packed", _words(integers.cpu(), bits)),
            (f"{name}_scale", scales.to(torch.bfloat16).cpu()),
            (f"{name}_shape", torch.tensor(floats.shape)),
        ]

    def floats(self, tensors: list[Tensor]) -> Tensor:
        """See `QuantizedForm`."""
        parts = dict(zip((WEIGHT, WEIGHT_SCALE), tensors, strict=False))
        whole = dequantized(self._scheme, parts, torch.float32)
        # Words may have padding at the end of a row.
        return whole[:, : int(tensors[2][1])]

    def round_inputs(self, x_TD: Tensor) -> Tensor:
        """Inputs are not rounded."""
        return x_TD

    def description(self, kept: list[str]) -> dict[str, Any]:
        """See `QuantizedForm`."""
        size = self._scheme.group_size
        weights: dict[str, Any] = {
            "num_bits": self._scheme.bits, "type": "int", "symmetric": True, "dynamic": False,
            "strategy": "channel" if size is None else "group", "group_size": size,
        }  # fmt: skip
        return compressed("pack-quantized", weights, None, kept)


def _fp8_grid(floats: Tensor, scales: Tensor) -> Tensor:
    return byte_reference.to_fp8(floats, scales).float() * scales


def _words(integers_ED: Tensor, bits: int) -> Tensor:
    """int32: consecutive inputs in a word, the lowest bits first."""
    count = _WORD_BITS // bits
    padded = torch.nn.functional.pad(integers_ED, (0, -integers_ED.shape[1] % count))
    # Bytes in memory are in the order of a word's bits.
    return integer_reference.pack(padded, bits).contiguous().view(torch.int32)


def compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, kept: list[str]
) -> dict[str, Any]:
    """The description of linear layers in one format of compressed-tensors; modules that are
    ``kept`` stay floats."""
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs,
        "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form,
        "quantization_status": "compressed", "config_groups": {"group_0": group},
        "ignore": kept, "kv_cache_scheme": None,
    }  # fmt: skip
