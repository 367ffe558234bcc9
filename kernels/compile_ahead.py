"""Starts to compile a model's slowest kernels in parallel, before their first use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from trimaran.kernels.cuda import attention as cuda_attention
from trimaran.kernels.cuda import decode as cuda_decode
from trimaran.kernels.cuda.grouped_gemm import compile_grouped
from trimaran.kernels.cuda.hopper_gemm import can_multiply
from trimaran.kernels.cuda.skinny_gemm import compile_choice
from trimaran.kernels.tables.grouped_table import derived_shapes, expert_limit
from trimaran.kernels.tables.tuned_choices import TunedChoices


class ModelSizes(NamedTuple):
    """The sizes of a model on a rank by which its kernels are known."""

    hidden: int
    vocab: int
    experts: int = 0
    """Experts of a layer on this rank; 0: none."""


def compile_ahead(
    device: torch.device,
    dtype: torch.dtype,
    sizes: ModelSizes,
    adapter_variants: Sequence[tuple[int, int]] = (),
    kv_dtype: torch.dtype | None = None,
    choices: TunedChoices | None = None,
    *,
    has_drafts: bool = False,
    has_trees: bool = False,
) -> None:
    """Start to compile the kernels that a model of these sizes uses on a GPU; returns at once.

    These are the CUDA C++ attention kernels, the measured products that read or write the
    hidden size, of as many experts too, and the sampling kernel that Triton compiles the
    longest. With ``adapter_variants``, tokens of a block and rank, also the kernels of LoRA
    adapters. With ``kv_dtype`` also attention of decodes over a quantized cache. ``choices``
    name the measured products; those that the package ships by default. With ``has_drafts``
    also attention in which a token and its drafts read their keys together; with ``has_trees``
    such steps' attention has masks.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from trimaran.kernels.triton.filters import compile_filters
    from trimaran.kernels.triton.lora import compile_adapters

    jobs: list[Callable[[], object]] = []
    if can_multiply(device, dtype):
        for cache_dtype in {dtype: None, kv_dtype or dtype: None}:
            jobs.append(partial(cuda_decode.compile_decode, cache_dtype))
            for shares in (False, True) if has_trees else (True,) if has_drafts else ():
                own = partial(cuda_decode.compile_decode, cache_dtype, shares=shares)
                jobs.append(partial(own, has_trees=has_trees))
        for head_size in cuda_attention.HEAD_SIZES:
            jobs.append(partial(cuda_attention.compile_prefill, dtype, head_size))
    # The dtype of the model's logits, and of the copies that penalties edit.
    for logits_dtype in (dtype, torch.float32):
        jobs.append(partial(compile_filters, device, logits_dtype, sizes.vocab))
    if can_multiply(device, dtype):
        choices = choices or TunedChoices(torch.cuda.get_device_name(device))
        table = choices.products
        for outputs, inner, kind in table.weights():
            if sizes.hidden in (outputs, inner):
                for shape in table.choices(outputs, inner, kind):
                    jobs.append(partial(compile_choice, shape, dtype, kind))
        for cut, grouped_kind, count in choices.experts.kernels(sizes.hidden):
            if count == sizes.experts:
                limit = expert_limit(count)
                jobs.append(partial(compile_grouped, cut, dtype, grouped_kind, limit))
        for cut in derived_shapes() if sizes.experts else ():
            limit = expert_limit(sizes.experts)
            jobs.append(partial(compile_grouped, cut, dtype, "gated", limit))
            jobs.append(partial(compile_grouped, cut, dtype, "plain", limit))
    for block_size, rank in adapter_variants:
        jobs.append(partial(compile_adapters, device, dtype, block_size, rank))
    run_beside(jobs)


def run_beside(jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs in order, in threads; returns at once.

    For jobs that fill a cache. A later request for a kernel waits for the cache entry, or
    raises the error of the job.
    """
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="compile")
    for job in jobs:
        pool.submit(job)
    pool.shutdown(wait=False)
