"""The rates that this machine's device sustains, measured before a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch

from trimaran.bench.limits.ranks import Ranks
from trimaran.bench.limits.roofline import Ceilings, ModelShape

_ROWS = 8192
_USABLE = 0.9
"""Share of a device's memory for engines."""


def measure(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, seconds: float
) -> Ceilings:
    """Run the layer's own products for ``seconds``, then copies; returns the sustained rates.

    A GPU under load lowers its clock: a short burst would give a ceiling that no longer run can
    reach.
    """
    with torch.inference_mode():
        flops = _product_rate(shape, device, dtype, seconds)
        bandwidth = _copy_rate(device)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(psutil.virtual_memory().total)
    return Ceilings(flops=flops, bandwidth=bandwidth, memory=_USABLE * memory)


def measure_all(
    shape: ModelShape, ranks: Ranks, dtype: torch.dtype, seconds: float
) -> Ceilings:
    """The sum of the rates that the devices of all ranks sustain at the same time.
    Collective.
    """
    ranks.barrier()
    every = ranks.of_all(measure(shape, ranks.device, dtype, seconds))
    memories = [each.memory for each in every]
    return Ceilings(
        flops=sum(each.flops for each in every),
        bandwidth=sum(each.bandwidth for each in every),
        # Ranks on the CPU share their host's.
        memory=sum(memories) if ranks.device.type == "cuda" else max(memories),
        devices=len(every) if ranks.device.type == "cuda" else 1,
    )


def _product_rate(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    rows = _ROWS if device.type == "cuda" else 256
    sizes = (
        (shape.hidden, shape.query_width + 2 * shape.kv_width),
        (shape.query_width, shape.hidden),
        # The experts of a token as one MLP: the rate of a narrow expert alone would be lower.
        (shape.hidden, (shape.mlp_matrices - 1) * shape.mlp_width),
        (shape.mlp_width, shape.hidden),
    )
    # Random values: products of zeros take less power and run faster.
    pairs = [
        (
            torch.randn((rows, inputs), device=device, dtype=dtype),
            torch.randn((outputs, inputs), device=device, dtype=dtype),
        )
        for inputs, outputs in sizes
    ]
    flops = sum(2.0 * rows * inputs * outputs for inputs, outputs in sizes)

    def run() -> None:
        for x, weight in pairs:
            torch.nn.functional.linear(x, weight)

    return flops * _calls_per_s(run, device, seconds)


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
