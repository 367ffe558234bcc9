"""`trimaran bench kernels`: every kernel against its own roofline, and other libraries."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Container, Iterator
from typing import Any

import torch

from trimaran.bench.kernels import cases_integers, cases_operators, library_kernels
from trimaran.bench.kernels.kernel_case import KernelCase
from trimaran.bench.kernels.kernel_timing import seconds_a_call
from trimaran.bench.kernels.library_kernels import LibraryKernel
from trimaran.bench.limits import ceilings
from trimaran.bench.limits.roofline import Ceilings, ModelShape
from trimaran.bench.limits.shapes import SHAPES, pretrained_config
from trimaran.bench.results import results
from trimaran.comm.errors import ConfigError
from trimaran.worker.models.registry import dtype_by_name

_NO_MEMORY = "can't allocate memory"
_CALLS = 32
"""Sets of inputs that alternate, so that the caches hold none of the next call's inputs."""


def run_kernels(args: argparse.Namespace) -> int:
    """Time every case; the table names the percentage of the roofline."""
    device, dtype = torch.device(args.device), dtype_by_name(args.dtype)
    _check(args, device)
    shape = ModelShape.of(pretrained_config(args.shape, args.dtype))
    limits = ceilings.measure(shape, device, dtype, args.ceiling_seconds)
    facts = results.environment(device, limits)
    print(limits)
    columns = ["torch", *library_kernels.installed()]
    heads = "".join(f"{f'{name} us':>16}" for name in columns)
    print(f"{'operator':<34}{'size':<24}{'us':>10}{'% of limit':>12}{heads}")
    num_differing = 0
    for case in _within_memory(args, _cases(args, shape, device, dtype)):
        differing = library_kernels.differing(case.run, case.libraries)
        for kernel, share in differing.items():
            name = f"{kernel.library}'s {kernel.backend}"
            print(f"{case.name}, {case.shape}: {name} is {100 * share:.1f} % off, not timed")
        num_differing += len(differing)
        times = _times(case, limits, device, differing)
        beside = (times.get(f"{name}_us") for name in columns)
        cells = "".join(f"{'' if each is None else f'{each:.1f}':>16}" for each in beside)
        print(
            f"{case.name:<34}{case.shape:<24}{times['us']:10.1f}{times['limit_pct']:12.1f}"
            + cells.rstrip(),
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
                **times,
            }
            results.append(args.output, {**line, **facts})
    return int(num_differing > 0)


def _times(
    case: KernelCase,
    limits: Ceilings,
    device: torch.device,
    without: Container[LibraryKernel],
) -> dict[str, Any]:
    """The measured fields of a result line: ours, and every library's."""
    ours = seconds_a_call([case.run] * _CALLS, device)
    theirs = seconds_a_call([case.peer] * _CALLS, device) if case.peer else None
    share = 100 * case.limit_s(limits.bandwidth, limits.flops) / ours
    others = {
        kernel: seconds_a_call([kernel.run] * _CALLS, device)
        for kernel in case.libraries
        if kernel not in without
    }
    return {
        "us": round(1e6 * ours, 2),
        "limit_pct": round(share, 1),
        "torch_us": None if theirs is None else round(1e6 * theirs, 2),
        **library_kernels.fields(others),
    }


def _check(args: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device is cuda but torch finds no GPU here: name --device cpu, which has the "
            "areas operators and integers, or run it on a GPU"
        )
    others = [area for area in args.areas if area not in ("operators", "integers")]
    if others and device.type != "cuda":
        raise ConfigError(f"--areas {others[0]}: these kernels run on a GPU: --device cuda")
    if "kv_lora_rank" in SHAPES[args.shape]:
        raise ConfigError(
            f"--shape {args.shape} has latent attention, whose kernels are timed by "
            "benchmarks/gpu_latent.py. Name another shape."
        )
    if set(others) - {"fp8"} and args.shape != "llama8b":
        raise ConfigError(
            f"--areas {others[0]} has the sizes of llama8b, not of {args.shape}: leave --shape "
            "out, or name only the areas operators, fp8 and integers"
        )


def _within_memory(
    args: argparse.Namespace, cases: Iterator[KernelCase]
) -> Iterator[KernelCase]:
    """The cases, each created with its inputs when it is reached.

    Raises:
        ConfigError: the device's memory does not hold them.
    """
    try:
        yield from cases
    except RuntimeError as error:
        # Torch has no error type of its own for the host's memory.
        if not isinstance(error, torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        raise ConfigError(
            f"--rows {' '.join(map(str, args.rows))} with --context {args.context} of --shape "
            f"{args.shape} need more memory than {args.device} has. Name smaller ones."
        ) from None


def _cases(
    args: argparse.Namespace, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    for area in args.areas:
        if area == "operators":
            yield from cases_operators.cases(shape, device, dtype, args.rows, args.context)
        elif area == "fp8":
            # Imported only if requested: the module holds GPU kernels.
            cases_fp8 = importlib.import_module("trimaran.bench.kernels.cases_fp8")
            yield from cases_fp8.cases(shape, device, dtype, args.rows)
        elif area == "integers":
            yield from cases_integers.cases(shape, device, dtype, args.rows)
        else:
            # Imported only if requested: these modules hold GPU kernels.
            module = importlib.import_module(f"trimaran.bench.kernels.cases_{area}")
            yield from module.cases(device, dtype)
