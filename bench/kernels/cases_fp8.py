"""FP8 and INT8 products and FP8 experts of a layer: as served, each kernel alone, and bf16
beside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trimaran.bench.kernels.kernel_case import KernelCase, in_turn
from trimaran.bench.kernels.kernel_timing import rotated
from trimaran.bench.limits.roofline import ModelShape
from trimaran.kernels.byte_products import (
    FIXED_TILE,
    GpuByteProduct,
    can_use_library,
    multiply_by_library,
    stream_tile,
)
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.quantized import (
    FP8,
    INT8,
    BlockMap,
    ByteInputs,
    ByteWeight,
    Fp8Experts,
)
from trimaran.kernels.triton.byte_gemm import (
    MAX_STREAM_ROWS,
    Inputs,
    Tile,
    multiply_stream,
    multiply_tiles,
)

# Shapes: T rows (tokens), D inner width, E outputs.

_BLOCK = 128
_Set = tuple[Tensor, Inputs, GpuByteProduct, ByteWeight]
_Experts = tuple[Tensor, Tensor, Tensor, Fp8Experts, Fp8Experts]

_OTHER_TILES = (
    Tile(64, 128, 128, warps=4, stages=3), Tile(128, 128, 128, warps=8, stages=4),
    Tile(128, 64, 128, warps=4, stages=4), Tile(128, 128, 128, warps=8, stages=3),
    Tile(64, 64, 128, warps=4, stages=4),
)  # fmt: skip
"""Cuts of many rows with blocks that are timed besides the served cut. With small cuts one
program of a multiprocessor can multiply while another one scales its sums."""

_MANY_ROWS = 1024
"""Rows from which other cuts are timed."""


def cases(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: list[int]
) -> Iterator[KernelCase]:
    """Each product of a layer in FP8 with scales a row and with blocks, and in INT8; the column
    ``torch`` has the same product in ``dtype`` by our operators."""
    sizes = {
        "qkv": (shape.hidden, shape.query_width + 2 * shape.kv_width),
        "out": (shape.query_width, shape.hidden),
    }
    if shape.experts <= 1:
        sizes["gate_up"] = shape.hidden, 2 * shape.inner
        sizes["down"] = shape.inner, shape.hidden
    for count in rows:
        for name, size in sizes.items():
            for kind in ("row", "block", "INT8"):
                yield from _cases(name, (count, *size), kind, device, dtype)
        if shape.experts > 1:
            for is_block in (False, True):
                yield _experts(shape, device, dtype, count, is_block=is_block)


def _experts(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, rows: int, *, is_block: bool
) -> KernelCase:
    """The experts that are drawn for each token, without the choice; the column ``torch`` has
    the same in ``dtype`` by our operators."""
    experts, chosen, hidden, inner = shape.experts, shape.chosen, shape.hidden, shape.inner
    ops = select_ops(device, dtype)

    def make() -> _Experts:
        x = torch.randn((rows, hidden), device=device, dtype=dtype)
        weights, ids = torch.rand((rows, experts), device=device).topk(chosen)
        sizes = (2 * inner, hidden), (hidden, inner)
        stacks = [_stack(experts, *size, is_block, device) for size in sizes]
        return x, weights, ids.int(), stacks[0], stacks[1]

    def make_floats() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, weights, ids, *_ = make()
        gate_up = torch.randn((experts, 2 * inner, hidden), device=device, dtype=dtype)
        down = torch.randn((experts, hidden, inner), device=device, dtype=dtype)
        return x, weights, ids, gate_up.mul_(0.02), down.mul_(0.02)

    read = experts * (1 - (1 - chosen / experts) ** rows)
    num_bytes = int(3 * read * hidden * inner + 2 * rows * hidden * dtype.itemsize)
    floats = rotated(make_floats, num_bytes * dtype.itemsize)
    return KernelCase(
        name=f"experts {'block' if is_block else 'row'}",
        shape=f"{rows} x {hidden} x {inner}, {chosen} of {experts}",
        dtype="float8_e4m3fn",
        run=in_turn(lambda each: ops.fp8_expert_mlp(*each), rotated(make, num_bytes)),
        num_bytes=num_bytes,
        # The unit of the limit is a product in 16 bits, which takes twice the time.
        flops=3 * rows * chosen * hidden * inner,
        peer=in_turn(lambda each: ops.expert_mlp(*each), floats),
    )


def _stack(
    experts: int, outputs: int, inner: int, is_block: bool, device: torch.device
) -> Fp8Experts:
    one = _weight(outputs, inner, "block" if is_block else "row", device)
    values = torch.empty((experts, outputs, inner), device=device, dtype=FP8)
    values.copy_(one.values)
    scales = one.scales.expand(experts, *one.scales.shape).contiguous()
    return Fp8Experts(values, scales, one.blocks)


def _cases(
    name: str,
    size: tuple[int, int, int],
    kind: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[KernelCase]:
    rows, inner, outputs = size

    def make() -> _Set:
        x = torch.randn((rows, inner), device=device, dtype=dtype)
        weight = _weight(outputs, inner, kind, device)
        inputs = ByteInputs(dtype=weight.values.dtype)
        product = GpuByteProduct(weight, inputs, is_fixed=False)
        return x, product.quantize(x), product, weight

    num_bytes = inner * outputs + rows * (inner + outputs * dtype.itemsize)
    sets = rotated(make, num_bytes)

    def case(kernel: str, run: Callable[[_Set], object], **more: object) -> KernelCase:
        return KernelCase(
            name=f"{name} {kind} {kernel}",
            shape=f"{rows} x {inner} x {outputs}",
            dtype=str(sets[0][3].values.dtype).removeprefix("torch."),
            run=in_turn(run, sets),
            num_bytes=num_bytes,
            # The unit of the limit is a product in 16 bits, which takes twice the time.
            flops=rows * inner * outputs,
            **more,  # type: ignore[arg-type]
        )

    yield case("served", lambda each: each[2](each[0]), peer=_floats(size, device, dtype))
    yield case("quantize", lambda each: each[2].quantize(each[0]))
    if name == "gate_up" and sets[0][2].gated(sets[0][0]) is not None:
        yield case("with SwiGLU", lambda each: each[2].gated(each[0]))
    for kernel, run in _kernels(size, sets[0][3], dtype).items():
        yield case(kernel, run)


def _kernels(
    size: tuple[int, int, int], example: ByteWeight, dtype: torch.dtype
) -> dict[str, Callable[[_Set], object]]:
    """The kernels that could serve a number of rows, on inputs that are quantized already."""
    rows, inner, outputs = size
    found: dict[str, Callable[[_Set], object]] = {}
    if rows <= MAX_STREAM_ROWS:
        tile = stream_tile(rows, outputs, inner)
        found["stream"] = lambda each: multiply_stream(each[1], each[3], None, dtype, tile)
    if example.blocks is not None and rows >= _MANY_ROWS:
        for other in _OTHER_TILES:
            name = f"{other.rows}x{other.columns} {other.warps} warps {other.stages} stages"
            found[name] = functools.partial(_multiply, tile=other, dtype=dtype)
    found["fixed"] = lambda each: multiply_tiles(each[1], each[3], None, dtype, FIXED_TILE)
    if can_use_library(example) and dtype is torch.bfloat16:
        found["library"] = lambda each: multiply_by_library(each[1], each[3], None)
        found["library, sums in float32"] = lambda each: torch._scaled_mm(
            each[1].values, each[3].values.t(), scale_a=each[1].scales[:, None],
            scale_b=each[3].scales[None, :], out_dtype=torch.bfloat16,
        )  # fmt: skip
    return found


def _multiply(each: _Set, *, tile: Tile, dtype: torch.dtype) -> Tensor:
    return multiply_tiles(each[1], each[3], None, dtype, tile)


def _weight(outputs: int, inner: int, kind: str, device: torch.device) -> ByteWeight:
    values = torch.randn((outputs, inner), device=device, dtype=torch.bfloat16).to(FP8)
    if kind == "INT8":
        values = torch.randint(-127, 128, (outputs, inner), device=device, dtype=INT8)
    if kind != "block":
        return ByteWeight(values, torch.full((outputs,), 0.02, device=device))
    rows = (torch.arange(outputs) // _BLOCK).to(torch.int32)
    shape = (-(-outputs // _BLOCK), -(-inner // _BLOCK))
    scales = torch.full(shape, 0.02, device=device)
    return ByteWeight(values, scales, BlockMap.of(rows, _BLOCK, 0, device))


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
