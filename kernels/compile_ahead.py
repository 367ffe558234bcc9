"""Begins to compile a model's CUDA C++ kernels before they are asked for, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from trimaran.kernels.cuda_build import load_cubin
from trimaran.kernels.hopper_gemm import can_multiply, compile_gemm
from trimaran.kernels.product_table import ProductTable

_ATTENTION = ("attention_prefill", "attention_decode")
"""Sources that every model uses, the longest first."""


def compile_ahead(device: torch.device, dtype: torch.dtype, hidden_size: int) -> None:
    """Begin to compile what a model with this hidden size uses on ``device``; returns at once.

    Its products are taken to be those measured ones that read or write ``hidden_size``.
    """
    if not can_multiply(device, dtype):
        return
    jobs: list[Callable[[], bytes]] = [
        partial(load_cubin, name, "sm_90a") for name in _ATTENTION
    ]
    table = ProductTable.of_device(torch.cuda.get_device_name(device))
    for outputs, inner, kind in table.weights():
        if hidden_size in (outputs, inner):
            for shape in table.choices(outputs, inner, kind):
                jobs.append(partial(compile_gemm, shape, dtype, kind))
    run_beside(jobs)


def run_beside(jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs in threads of their own, in their order; returns at once.

    For jobs that leave a cache filled. Whoever asks for the same later waits for it there, or
    meets there the error that a job ended with.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
    for job in jobs:
        pool.submit(job)
    pool.shutdown(wait=False)
