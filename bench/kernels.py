"""`trimaran bench kernels`: every kernel against its own roofline, and beside torch's."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import torch

from trimaran.bench import cases_operators, ceilings, results
from trimaran.bench.kernel_case import KernelCase
from trimaran.bench.kernel_timing import seconds_a_call
from trimaran.bench.roofline import ModelShape
from trimaran.bench.shapes import SHAPES
from trimaran.comm.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_CALLS = 32
"""In turn, so that the inputs of one call have left the caches when they come again."""


def run_kernels(args: argparse.Namespace) -> int:
    """Time every case; the table names the percentage of the roofline."""
    device, dtype = torch.device(args.device), _DTYPES[args.dtype]
    _check(args, device)
    shape = ModelShape.of({**SHAPES[args.shape], "dtype": args.dtype})
    limits = ceilings.measure(shape, device, dtype, args.ceiling_seconds)
    facts = results.environment(device, limits)
    print(f"{limits.flops / 1e12:.1f} TFLOP/s, {limits.bandwidth / 1e12:.2f} TB/s")
    print(f"{'operator':<34}{'size':<24}{'us':>10}{'% of limit':>12}{'torch us':>12}")
    for case in _cases(args, shape, device, dtype):
        ours = seconds_a_call([case.run] * _CALLS, device)
        theirs = seconds_a_call([case.peer] * _CALLS, device) if case.peer else None
        share = 100 * case.limit_s(limits.bandwidth, limits.flops) / ours
        beside = "" if theirs is None else f"{1e6 * theirs:12.1f}"
        print(
            f"{case.name:<34}{case.shape:<24}{1e6 * ours:10.1f}{share:12.1f}{beside}",
            flush=True,
        )
        if args.output:
            line = {
                "benchmark": "kernels",
                "shape": args.shape,
                "gpus": int(device.type == "cuda"),
                "operator": case.name,
                "size": case.shape,
                "dtype": case.dtype,
                "us": round(1e6 * ours, 2),
                "limit_pct": round(share, 1),
                "torch_us": None if theirs is None else round(1e6 * theirs, 2),
            }
            results.append(args.output, {**line, **facts})
    return 0


def _check(args: argparse.Namespace, device: torch.device) -> None:
    others = [area for area in args.areas if area != "operators"]
    if others and device.type != "cuda":
        raise ConfigError(f"--areas {others[0]}: these kernels run on a GPU: --device cuda")
    if "kv_lora_rank" in SHAPES[args.shape]:
        raise ConfigError(
            f"--shape {args.shape} has latent attention, whose kernels are timed by "
            "benchmarks/gpu_latent.py. Name another shape."
        )
    if others and args.shape != "llama8b":
        raise ConfigError(
            f"--areas {others[0]} has the sizes of llama8b, not of {args.shape}: leave --shape "
            "out, or name only the area operators"
        )


def _cases(
    args: argparse.Namespace, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    for area in args.areas:
        if area == "operators":
            yield from cases_operators.cases(shape, device, dtype, args.rows, args.context)
        else:
            # Imported only where asked for: these modules hold GPU kernels.
            module = importlib.import_module(f"trimaran.bench.cases_{area}")
            yield from module.cases(device, dtype)
