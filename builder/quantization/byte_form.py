"""The format of folders whose weights and inputs of products are INT8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimaran.builder.quantization.quantized_forms import compressed
from trimaran.kernels import integer_reference
from trimaran.worker.config.shard_file import TensorEntry

_BITS = 8
_INTEGERS = {"num_bits": _BITS, "type": "int", "symmetric": True}


class ByteForm:
    """compressed-tensors' ``int-quantized``, symmetric: a scale in bf16 for each row of a
    weight or for all of it, and inputs with a scale a token or a static one."""

    numbers = "INT8"
    bits = _BITS

    def __init__(
        self, *, has_row_scales: bool, input_scales: Mapping[str, float] | None = None
    ) -> None:
        """``input_scales`` are the static scales of inputs by the names of weights; None: each
        token has a scale."""
        self._has_row_scales = has_row_scales
        self._input_scales = input_scales

    def entries(self, name: str, entry: TensorEntry) -> dict[str, tuple[str, list[int]]]:
        """See `QuantizedForm`."""
        scales = [entry.shape[0], 1] if self._has_row_scales else [1]
        made = {name: ("I8", list(entry.shape)), f"{name}_scale": ("BF16", scales)}
        if self._input_scales is not None:
            made[_input_scale(name)] = "F32", [1]
        return made

    def tensors(
        self, name: str, floats: Tensor, gram_DD: Tensor | None = None
    ) -> list[tuple[str, Tensor]]:
        """See `QuantizedForm`; weights are rounded to the nearest in any case."""
        whole = floats if self._has_row_scales else floats.reshape(1, -1)
        integers, scales = integer_reference.quantize_weight(whole, _BITS, None)
        signed = (integers.to(torch.int16) - (1 << (_BITS - 1))).to(torch.int8)
        scales = scales.to(torch.bfloat16)
        made = [
            (name, signed.view(floats.shape)),
            (f"{name}_scale", scales if self._has_row_scales else scales.reshape(1)),
        ]
        if self._input_scales is not None:
            made.append((_input_scale(name), torch.tensor([self._input_scales[name]])))
        return made

    def floats(self, tensors: list[Tensor]) -> Tensor:
        """See `QuantizedForm`."""
        return tensors[0].float() * tensors[1].float()

    def round_inputs(self, x_TD: Tensor) -> Tensor:
        """Inputs with a scale a token."""
        values, scales_T1 = integer_reference.quantize_inputs(x_TD)
        return values.float() * scales_T1

    def description(self, kept: list[str]) -> dict[str, Any]:
        """See `QuantizedForm`."""
        strategy = "channel" if self._has_row_scales else "tensor"
        weights = {**_INTEGERS, "strategy": strategy, "dynamic": False}
        is_static = self._input_scales is not None
        inputs = {
            **_INTEGERS,
            "strategy": "tensor" if is_static else "token",
            "dynamic": not is_static,
        }
        return compressed("int-quantized", weights, inputs, kept)


def _input_scale(weight: str) -> str:
    return f"{weight.removesuffix('weight')}input_scale"
