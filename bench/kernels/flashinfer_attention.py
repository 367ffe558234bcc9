"""FlashInfer's attention over our paged cache, without a copy, if it is installed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.bench.kernels import library_kernels
from trimaran.bench.kernels.kernel_case import in_turn
from trimaran.bench.kernels.library_kernels import LibraryKernel
from trimaran.bench.kernels.paged_inputs import BLOCK, HEAD_SIZE, HEADS, KV_HEADS, PagedInputs
from trimaran.kernels.attention import AttentionSpec

_WORKSPACE_BYTES = 512 << 20
"""Workspace for partial results of split sequences."""


def of_decodes(inputs: PagedInputs, spec: AttentionSpec) -> tuple[LibraryKernel, ...]:
    """One query a sequence, on tensor cores and without."""
    if not _serves(inputs):
        return ()
    import flashinfer

    begins, blocks, last = pages(inputs)
    made = []
    for backend, use_tensor_cores in (("fa2", True), ("cuda cores", False)):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(inputs.query.device),
            "HND",
            use_tensor_cores=use_tensor_cores,
            backend="fa2",
        )
        wrapper.plan(
            begins, blocks, last, HEADS, KV_HEADS, HEAD_SIZE, BLOCK, **_planned(inputs, spec)
        )
        made.append(_kernel(backend, wrapper, inputs))
    return tuple(made)


def of_prompts(inputs: PagedInputs, spec: AttentionSpec) -> tuple[LibraryKernel, ...]:
    """Several queries a sequence, its last tokens; on Hopper also by the Hopper kernels."""
    if not _serves(inputs):
        return ()
    import flashinfer
    from flashinfer.utils import is_sm90a_supported

    device = inputs.query.device
    begins, blocks, last = pages(inputs)
    queries = inputs.metadata.query_start_loc.cpu()
    made = []
    for backend in ("fa2", "fa3") if is_sm90a_supported(device) else ("fa2",):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(device), "HND", backend=backend
        )
        wrapper.plan(
            queries, begins, blocks, last, HEADS, KV_HEADS, HEAD_SIZE, BLOCK,
            causal=True, **_planned(inputs, spec),
        )  # fmt: skip
        made.append(_kernel(backend, wrapper, inputs))
    return tuple(made)


def pages(inputs: PagedInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The block offsets of each sequence, the blocks, and the tokens in each last block."""
    lens = inputs.metadata.seq_lens.cpu()
    tables = inputs.metadata.block_tables.cpu()
    counts = (lens + BLOCK - 1) // BLOCK
    begins = F.pad(counts.cumsum(0), (1, 0)).int()
    blocks = [row[:count] for row, count in zip(tables, counts.tolist(), strict=True)]
    return begins, torch.cat(blocks), (lens - 1) % BLOCK + 1


def _serves(inputs: PagedInputs) -> bool:
    has_type = inputs.query.dtype in (torch.bfloat16, torch.float16)
    return has_type and "flashinfer" in library_kernels.installed()


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """One workspace for all: kernels run one after another."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _planned(inputs: PagedInputs, spec: AttentionSpec) -> dict[str, Any]:
    dtype = inputs.query.dtype
    return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": spec.scale}


def _kernel(backend: str, wrapper: Any, inputs: PagedInputs) -> LibraryKernel:
    """A launch after the plan needs no host work, so graphs can capture the launch."""
    query = inputs.query

    def run(layer: Tensor) -> Tensor:
        keys, values = (layer[:, each].transpose(1, 2) for each in (0, 1))
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        wrapper.run(query, (keys, values), out=output)
        return output

    return LibraryKernel("flashinfer", backend, in_turn(run, inputs.layers))
