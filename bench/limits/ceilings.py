"""The rates that this machine's device sustains, measured before a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from trimaran.bench.limits.ranks import Ranks
from trimaran.bench.limits.roofline import Ceilings, ModelShape
from trimaran.kernels.dispatch import select_ops
from trimaran.kernels.quantized import FP8, INT8, ByteInputs, ByteRows, ByteWeight
from trimaran.kernels.tables.product_table import Bytes

_ROWS = 8192
_USABLE = 0.9
"""Share of a device's memory for engines."""


def measure(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    *,
    numbers: Bytes = "",
) -> Ceilings:
    """Run the layer's own products for ``seconds``, then copies; returns the sustained rates.

    With ``numbers`` the products run with weights and inputs of these too, on a GPU.

    A GPU under load lowers its clock: a short burst would give a ceiling that no longer run can
    reach.
    """
    with torch.inference_mode():
        run, flops_a_run = _products(shape, device, dtype)
        flops = flops_a_run * _calls_per_s(run, device, seconds)
        quantized_flops = 0.0
        if numbers and device.type == "cuda":
            of_numbers = _fp8_products if numbers == "FP8" else _int8_products
            run, flops_a_run = of_numbers(shape, device)
            quantized_flops = flops_a_run * _calls_per_s(run, device, seconds)
        bandwidth = _copy_rate(device)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(psutil.virtual_memory().total)
    return Ceilings(
        flops=flops,
        bandwidth=bandwidth,
        memory=_USABLE * memory,
        quantized_flops=quantized_flops,
    )


def measure_all(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    seconds: float,
    *,
    numbers: Bytes = "",
) -> Ceilings:
    """The sum of the rates that the devices of all ranks sustain at the same time.
    Collective.
    """
    ranks.barrier()
    every = ranks.of_all(measure(shape, ranks.device, dtype, seconds, numbers=numbers))
    memories = [each.memory for each in every]
    return Ceilings(
        flops=sum(each.flops for each in every),
        bandwidth=sum(each.bandwidth for each in every),
        # Ranks on the CPU share their host's.
        memory=sum(memories) if ranks.device.type == "cuda" else max(memories),
        devices=len(every) if ranks.device.type == "cuda" else 1,
        quantized_flops=sum(each.quantized_flops for each in every),
    )


_Runs = tuple[Callable[[], None], float]
"""A call of a layer's products, and its operations."""


def _sizes(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a layer's products."""
    return (
        (shape.hidden, shape.query_width + 2 * shape.kv_width),
        (shape.query_width, shape.hidden),
        # The experts of a token as one MLP: the rate of a narrow expert alone would be lower.
        (shape.hidden, (shape.mlp_matrices - 1) * shape.mlp_width),
        (shape.mlp_width, shape.hidden),
    )


def _products(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> _Runs:
    rows = _ROWS if device.type == "cuda" else 256
    # Random values: products of zeros take less power and run faster.
    pairs = [
        (
            torch.randn((rows, inputs), device=device, dtype=dtype),
            torch.randn((outputs, inputs), device=device, dtype=dtype),
        )
        for inputs, outputs in _sizes(shape)
    ]

    def run() -> None:
        for x, weight in pairs:
            torch.nn.functional.linear(x, weight)

    return run, sum(2.0 * rows * inputs * outputs for inputs, outputs in _sizes(shape))


def _fp8_products(shape: ModelShape, device: torch.device) -> _Runs:
    """The same with a scale a token and an output, by the library, whose fastest sums have 22
    bits."""
    products = []
    for inputs, outputs in _sizes(shape):
        x = torch.randn((_ROWS, inputs), device=device).to(FP8)
        weight = torch.randn((outputs, inputs), device=device).to(FP8)
        scales = torch.ones((_ROWS, 1), device=device), torch.ones((1, outputs), device=device)
        products.append((x, weight.t(), *scales))

    def run() -> None:
        for x, weight, of_x, of_weight in products:
            torch._scaled_mm(
                x, weight, of_x, of_weight, out_dtype=torch.bfloat16, use_fast_accum=True
            )

    return run, sum(2.0 * _ROWS * inputs * outputs for inputs, outputs in _sizes(shape))


def _int8_products(shape: ModelShape, device: torch.device) -> _Runs:
    """The same in INT8 by our own kernel: the library's product, which scales nothing, takes
    twice the time."""
    ops = select_ops(device, torch.bfloat16)
    products = []
    for inputs, outputs in _sizes(shape):
        x, values = (
            torch.randint(-127, 128, (rows, inputs), device=device, dtype=INT8)
            for rows in (_ROWS, outputs)
        )
        weight = ByteWeight(values, torch.ones(outputs, device=device))
        product = ops.int8_product(weight, ByteInputs(dtype=INT8))
        assert product is not None, "every GPU multiplies INT8"
        products.append(
            (product, ByteRows(x, torch.ones(_ROWS, device=device), torch.bfloat16))
        )

    def run() -> None:
        for product, x in products:
            product(x)

    return run, sum(2.0 * _ROWS * inputs * outputs for inputs, outputs in _sizes(shape))


def _copy_rate(device: torch.device) -> float:
    count = (1 << 30) if device.type == "cuda" else (1 << 25)
    source = torch.ones(count, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    return 8.0 * count * _calls_per_s(lambda: target.copy_(source), device, 0.5)


def _calls_per_s(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    start = time.perf_counter()
    calls = 0
    while (elapsed := time.perf_counter() - start) < seconds or not calls:
        for _ in range(10):
            run()
        calls += 10
        wait()
    return calls / elapsed
