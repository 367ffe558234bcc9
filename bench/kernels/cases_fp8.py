"""FP8 products of a layer of any shape: as served, each kernel alone, and bf16 beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.bench.kernels.kernel_timing import rotated
from trimaran.bench.limits.roofline import ModelShape
from trimaran.comm.errors import ConfigError
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.fp8_products import (
    FIXED_TILE,
    TritonFp8Product,
    can_use_library,
    multiply_by_library,
    stream_tile,
    wide_tile,
)
from trimaran.kernels.quantized import FP8, BlockMap, Fp8Inputs, Fp8Weight
from trimaran.kernels.triton.fp8_gemm import (
    MAX_STREAM_ROWS,
    Inputs,
    multiply_stream,
    multiply_tiles,
)

# Shapes: T rows (tokens), D inner width, E outputs.

_BLOCK = 128
_Set = tuple[Tensor, Inputs, TritonFp8Product, Fp8Weight]


def cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: list[int]
) -> Iterator[KernelCase]:
    """Each product of a layer with scales a row and with blocks; the column ``torch`` has the
    same product in ``dtype`` by our operators."""
    if shape.experts > 1:
        raise ConfigError("--areas fp8 has no experts yet: name a shape with an MLP")
    sizes = {
        "qkv": (shape.hidden, shape.query_width + 2 * shape.kv_width),
        "out": (shape.query_width, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.inner),
        "down": (shape.inner, shape.hidden),
    }
    for count in rows:
        for name, size in sizes.items():
            for is_block in (False, True):
                yield from _cases(name, (count, *size), is_block, device, dtype)


def _cases(
    name: str,
    size: tuple[int, int, int],
    is_block: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[KernelCase]:
    rows, inner, outputs = size

    def make() -> _Set:
        x = torch.randn((rows, inner), device=device, dtype=dtype)
        weight = _weight(outputs, inner, is_block, device)
        product = TritonFp8Product(weight, Fp8Inputs(), is_fixed=False)
        return x, product.quantize(x), product, weight

    num_bytes = inner * outputs + rows * (inner + outputs * dtype.itemsize)
    sets = rotated(make, num_bytes)
    kind = f"{name} {'block' if is_block else 'row'}"

    def case(kernel: str, run: Callable[[_Set], object], **more: object) -> KernelCase:
        return KernelCase(
            name=f"{kind} {kernel}",
            shape=f"{rows} x {inner} x {outputs}",
            dtype="float8_e4m3fn",
            run=in_turn(run, sets),
            num_bytes=num_bytes,
            # The unit of the limit is a product in 16 bits, which takes twice the time.
            flops=rows * inner * outputs,
            **more,  # type: ignore[arg-type]
        )

    yield case("served", lambda each: each[2](each[0]), peer=_floats(size, device, dtype))
    yield case("quantize", lambda each: each[2].quantize(each[0]))
    for kernel, run in _kernels(size, sets[0][3], dtype).items():
        yield case(kernel, run)


def _kernels(
    size: tuple[int, int, int], example: Fp8Weight, dtype: torch.dtype
) -> dict[str, Callable[[_Set], object]]:
    """The kernels that could serve a number of rows, on inputs that are quantized already."""
    rows, inner, outputs = size
    found: dict[str, Callable[[_Set], object]] = {}
    if rows <= MAX_STREAM_ROWS:
        tile = stream_tile(rows, outputs, inner)
        found["stream"] = lambda each: multiply_stream(each[1], each[3], None, dtype, tile)
    wide = wide_tile(rows)
    found["tiles"] = lambda each: multiply_tiles(each[1], each[3], None, dtype, wide)
    found["fixed"] = lambda each: multiply_tiles(each[1], each[3], None, dtype, FIXED_TILE)
    if can_use_library(example) and dtype is torch.bfloat16:
        found["library"] = lambda each: multiply_by_library(each[1], each[3], None)
        found["library 22 bits"] = lambda each: torch._scaled_mm(
            each[1].values, each[3].values.t(), scale_a=each[1].scales[:, None],
            scale_b=each[3].scales[None, :], out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    return found


def _weight(outputs: int, inner: int, is_block: bool, device: torch.device) -> Fp8Weight:
    values = torch.randn((outputs, inner), device=device, dtype=torch.bfloat16).to(FP8)
    if not is_block:
        return Fp8Weight(values, torch.full((outputs,), 0.02, device=device))
    rows = (torch.arange(outputs, device=device) // _BLOCK).to(torch.int32)
    shape = (-(-outputs // _BLOCK), -(-inner // _BLOCK))
    scales = torch.full(shape, 0.02, device=device)
    return Fp8Weight(values, scales, BlockMap(rows, _BLOCK, 0))


def _floats(
    size: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """The product without quantization, by our operators."""
    rows, inner, outputs = size
    ops = select_ops(device, dtype)

    def make() -> tuple[Tensor, Tensor]:
        x = torch.randn((rows, inner), device=device, dtype=dtype)
        return x, torch.randn((outputs, inner), device=device, dtype=dtype).mul_(0.02)

    sets = rotated(make, dtype.itemsize * inner * outputs)
    return in_turn(lambda each: ops.linear(*each), sets)
