"""Runs quantized products and experts once at load and compares them with definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trimaran.comm.errors import ConfigError
from trimaran.kernels import byte_reference, integer_reference
from trimaran.kernels.byte_reference import ReferenceProduct
from trimaran.kernels.integer_reference import ReferenceIntegerProduct
from trimaran.kernels.integers import IntegerExperts, IntegerProduct, IntegerWeight
from trimaran.kernels.operators import Ops
from trimaran.kernels.quantized import INT8, ByteInputs, ByteProduct, ByteWeight, Fp8Experts
from trimaran.kernels.reference import silu_and_mul

_ROWS = (1, 16, 32, 64, 80, 160)
"""Tokens: few, the most that a streaming kernel takes, and more, which take other kernels."""

_OUTPUTS = 128
"""Outputs at either end that are compared, so that little is dequantized."""

_MAX_DIFFERENCE = 0.02
"""Largest deviation relative to the norm; rounding to bf16 makes less than 0.002."""

_CHECKED_EXPERTS = 4
_EXPERT_ROWS = (1, 64)
"""Tokens: few, and so many that an expert has several."""

_MAX_EXPERT_DIFFERENCE = 0.05
"""Rounding of SwiGLU to bf16 may move an input of the second product to the next FP8 number."""


def check_product(
    product: ByteProduct,
    weight: ByteWeight,
    inputs: ByteInputs,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
) -> None:
    """Raise `ConfigError` unless ``product`` computes what its definition does; for a weight
    of gate rows above up rows (``is_gated``) also with SwiGLU.
    """

    def definition(outputs: slice) -> _Product:
        return ReferenceProduct(_part(weight, outputs), inputs)

    numbers = "INT8" if weight.values.dtype is INT8 else "FP8"
    kind = _Kind(numbers, weight.values.shape, weight.values.device, dtype)
    _check(product, definition, kind, weight.scales)
    _check(lambda x: _sum_of_parts(product, x), definition, kind, weight.scales)
    _check_groups(product, weight, kind)
    if is_gated:
        for rows in _ROWS[1:]:
            _check_gated(product, definition, kind, rows)


def _sum_of_parts(product: ByteProduct, x_TD: Tensor) -> Tensor | None:
    parts_STE = product.parts(x_TD)
    return None if parts_STE is None else parts_STE.sum(0)


def _check_groups(product: ByteProduct, weight: ByteWeight, kind: _Kind) -> None:
    """The same of inputs with a scale for each group."""

    def multiply(x_TD: Tensor) -> Tensor | None:
        inputs = product.grouped_inputs(len(x_TD))
        if inputs is None:
            return None
        rows = byte_reference.quantize_rows(x_TD, inputs)
        parts_STE = product.parts(rows)
        return product(rows) if parts_STE is None else parts_STE.sum(0)

    def definition(outputs: slice) -> _Product:
        part = _part(weight, outputs)
        # Asked for numbers of tokens with groups alone.
        return lambda x: byte_reference.multiply_rows(
            byte_reference.quantize_rows(x, product.grouped_inputs(len(x)) or ByteInputs()),
            part,
        )

    _check(multiply, definition, kind, weight.scales)


def check_integer_product(
    product: IntegerProduct,
    weight: IntegerWeight,
    dtype: torch.dtype,
    *,
    has_byte_inputs: bool,
    is_gated: bool = False,
) -> None:
    """Raise `ConfigError` unless ``product`` computes what its definition does. With
    ``is_gated`` the weight has gate rows above up rows."""

    def definition(outputs: slice) -> _Product:
        part = weight.outputs(outputs)
        return ReferenceIntegerProduct(part, has_byte_inputs=has_byte_inputs)

    kind = _Kind(_numbers_of(weight), weight.shape, weight.values.device, dtype)
    _check(product, definition, kind, weight.scales)
    if is_gated:
        for rows in _ROWS:
            _check_gated(product, definition, kind, rows)


def _numbers_of(weight: IntegerWeight | IntegerExperts) -> str:
    return "FP4" if weight.is_fp4 else f"INT{weight.bits}"


_Product = Callable[[Tensor], Tensor]
_MaybeProduct = Callable[[Tensor], Tensor | None]
"""None where the device has no kernel for so many tokens."""

_Sums = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Inputs, weights and ids of experts to sums."""


class _Kind(NamedTuple):
    """What is multiplied, and where."""

    numbers: str
    shape: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype


def _check(
    product: _MaybeProduct,
    definition: Callable[[slice], _Product],
    kind: _Kind,
    scales: Tensor,
) -> None:
    (outputs, inner), device = kind.shape, kind.device
    # The outputs that are compared may have others.
    if not bool(scales.isfinite().all()):
        raise ConfigError(
            f"some scales of {kind.numbers} weights [{outputs}, {inner}] are infinite or no "
            "numbers: the folder is damaged, or the floats that were quantized held such "
            "values. Download the folder again."
        )
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        for rows in _ROWS:
            x = torch.randn((rows, inner), generator=generator, device=device).to(kind.dtype)
            found = product(x)
            if found is None:
                continue
            for end in (slice(0, _OUTPUTS), slice(max(outputs - _OUTPUTS, 0), outputs)):
                expected = definition(end)(x)
                difference = _difference(found[:, end], expected)
                # NaN is no agreement either.
                if not difference <= _MAX_DIFFERENCE:
                    raise ConfigError(
                        f"a product of {rows} tokens by {kind.numbers} weights "
                        f"[{outputs}, {inner}] is {100 * difference:.1f} % off its definition "
                        f"on {device}: the kernel does not suit this device. Serve the "
                        "checkpoint in bfloat16, and report this."
                    )


def _check_gated(
    product: ByteProduct | IntegerProduct,
    definition: Callable[[slice], _Product],
    kind: _Kind,
    rows: int,
) -> None:
    (outputs, inner), device = kind.shape, kind.device
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        # Small, so that products of gates and ups are in the range of float16.
        x = torch.randn((rows, inner), generator=generator, device=device) / 16
        x = x.to(kind.dtype)
        found = product.gated(x)
        if found is None:
            return
        half = outputs // 2
        first = max(half - _OUTPUTS, 0)
        gate = definition(slice(first, half))(x.float())
        up = definition(slice(half + first, outputs))(x.float())
        expected = silu_and_mul(torch.cat((gate, up), 1))
        difference = _difference(found[:, first:], expected)
    if not difference <= _MAX_DIFFERENCE:
        raise ConfigError(
            f"SwiGLU of {rows} tokens by {kind.numbers} weights [{outputs}, {inner}] is "
            f"{100 * difference:.1f} % off its definition on {device}: the kernel does not "
            "suit this device. Serve the checkpoint in bfloat16, and report this."
        )


def _part(weight: ByteWeight, outputs: slice) -> ByteWeight:
    """Some outputs of a weight."""
    values, scales, blocks = weight
    if blocks is None:
        return ByteWeight(values[outputs], scales[outputs])
    return ByteWeight(values[outputs], scales, blocks._replace(rows=blocks.rows[outputs]))


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    # A rank may hold padding alone, whose results are zero.
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def check_experts(
    ops: Ops,
    experts: tuple[Fp8Experts, Fp8Experts],
    stored: tuple[Fp8Experts, Fp8Experts],
    dtype: torch.dtype,
) -> None:
    """Raise `ConfigError` unless the sums of some ``experts``, gate and up stacks and down
    stacks, are those of the definition on the ``stored`` values."""
    values = stored[0].values
    is_finite = all(bool(each.scales.isfinite().all()) for each in stored)
    _compare_sums(
        lambda x, weights, ids: ops.fp8_expert_mlp(x, weights, ids, *experts),
        lambda x, weights, ids: byte_reference.expert_mlp(x, weights, ids, *stored),
        _Kind("FP8", values.shape, values.device, dtype),
        is_finite=is_finite,
    )


def check_integer_experts(
    ops: Ops,
    experts: tuple[IntegerExperts, IntegerExperts],
    defined: tuple[IntegerExperts, IntegerExperts],
    dtype: torch.dtype,
) -> None:
    """Raise `ConfigError` unless the sums of some ``experts``, gate and up stacks and down
    stacks, are those of the plain twin on the ``defined`` ones."""
    values, bits = defined[0].values, defined[0].bits
    scales = [each.scales for each in defined if each.scales is not None]
    shape = *values.shape[:2], values.shape[2] * 8 // bits
    _compare_sums(
        lambda x, weights, ids: ops.integer_expert_mlp(x, weights, ids, *experts),
        lambda x, weights, ids: integer_reference.expert_mlp(x, weights, ids, *defined),
        _Kind(_numbers_of(defined[0]), torch.Size(shape), values.device, dtype),
        is_finite=all(bool(each.isfinite().all()) for each in scales),
    )


def _compare_sums(run: _Sums, definition: _Sums, kind: _Kind, *, is_finite: bool) -> None:
    (num_experts, _, hidden), device = kind.shape, kind.device
    chosen = sorted({num_experts * at // _CHECKED_EXPERTS for at in range(_CHECKED_EXPERTS)})
    chosen[-1] = num_experts - 1
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        for rows in _EXPERT_ROWS:
            x = torch.randn((rows, hidden), generator=generator, device=device).to(kind.dtype)
            numbers = torch.arange(rows, device=device)[:, None] + torch.arange(
                min(2, len(chosen)), device=device
            )
            ids = torch.tensor(chosen, device=device, dtype=torch.int32)[numbers % len(chosen)]
            weights = torch.full(ids.shape, 0.5, device=device)
            difference = _difference(run(x, weights, ids), definition(x, weights, ids))
            # NaN is no agreement either.
            if not (is_finite and difference <= _MAX_EXPERT_DIFFERENCE):
                raise ConfigError(
                    f"experts in {kind.numbers} {list(kind.shape)} are "
                    f"{100 * difference:.1f} % off their definition for {rows} tokens on "
                    f"{device}: the kernel does not suit this device, or scales are no "
                    "numbers. Serve the checkpoint in bfloat16, and report this."
                )
