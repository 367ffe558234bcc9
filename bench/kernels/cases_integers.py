"""Products by integer weights of a layer of any shape as served, and bf16 beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.bench.kernels.kernel_timing import rotated
from trimaran.bench.limits.roofline import ModelShape
from trimaran.comm.errors import ConfigError
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.integers import Groups, IntegerProduct, IntegerWeight

# Shapes: T rows (tokens), D inner width, E outputs.

_GROUP = 128
_KINDS = {"int4 g128": (4, _GROUP), "int8 row": (8, 0)}
"""Bits and inputs of a group; 0: all of a row."""

_Set = tuple[Tensor, IntegerProduct, Tensor]


def cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: list[int]
) -> Iterator[KernelCase]:
    """Each product of a layer, and SwiGLU of its gates and ups, with weights of 4 and 8 bits.

    The column ``torch`` has the same in ``dtype`` by our operators.
    """
    if shape.experts > 1:
        raise ConfigError("--areas integers has no experts yet: name a shape with an MLP")
    sizes = {
        "qkv": (shape.hidden, shape.query_width + 2 * shape.kv_width),
        "out": (shape.query_width, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.inner),
        "down": (shape.inner, shape.hidden),
    }
    for count in rows:
        for kind in _KINDS:
            for name, size in sizes.items():
                yield _case(f"{name} {kind}", (count, *size), _KINDS[kind], device, dtype)
            whole = count, *sizes["gate_up"]
            yield _case(f"SwiGLU {kind}", whole, _KINDS[kind], device, dtype, is_gated=True)


def _case(
    name: str,
    size: tuple[int, int, int],
    kind: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_gated: bool = False,
) -> KernelCase:
    rows, inner, outputs = size
    ops = select_ops(device, dtype)
    results = outputs // 2 if is_gated else outputs

    def make() -> _Set:
        x = torch.randn((rows, inner), device=device, dtype=dtype)
        floats = torch.randn((outputs, inner), device=device, dtype=dtype).mul_(0.02)
        weight = _weight(outputs, inner, kind, device)
        return x, ops.integer_product(weight, is_gated=is_gated), floats

    def run(each: _Set) -> Tensor:
        x, product, _ = each
        if not is_gated:
            return product(x)
        fused = product.gated(x)
        return ops.silu_and_mul(product(x)) if fused is None else fused

    def peer(each: _Set) -> Tensor:
        x, _, floats = each
        return ops.gated_linear(x, floats) if is_gated else ops.linear(x, floats)

    bits, group = kind
    num_scales = outputs * (inner // group if group else 1)
    num_bytes = inner * outputs * bits // 8 + 2 * num_scales
    num_bytes += rows * (inner + results) * dtype.itemsize
    sets = rotated(make, num_bytes)
    return KernelCase(
        name=name,
        shape=f"{rows} x {inner} x {outputs}",
        dtype=f"int{bits}",
        run=in_turn(run, sets),
        num_bytes=num_bytes,
        flops=2 * rows * inner * outputs,
        peer=in_turn(peer, sets),
    )


def _weight(
    outputs: int, inner: int, kind: tuple[int, int], device: torch.device
) -> IntegerWeight:
    bits, group = kind
    values = torch.randint(0, 256, (outputs, inner * bits // 8), device=device)
    groups = Groups(group or inner)
    scales = torch.full((outputs, inner // groups.size), 2.0**-9, device=device)
    return IntegerWeight(values.to(torch.uint8), scales, groups, bits)
