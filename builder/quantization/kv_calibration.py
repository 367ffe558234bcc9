"""Scales of a quantized KV cache, from the keys and values of a text that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trimaran.worker.attention.backend import AttentionMetadata, ForwardContext
from trimaran.worker.config.kv_cache_dtype import LARGEST, KVScales
from trimaran.worker.models.interfaces import CausalLM

# Shapes: T tokens, D inner width, L layers, K key-value heads, H head size, B tokens of a
# block.

_BLOCK_SIZE = 16
_SMALLEST = 1e-6
"""The smallest scale: heads of zeros have some scale too."""


@torch.inference_mode()
def calibrate_kv_scales(
    model: CausalLM,
    kind: str,
    sequences: Iterable[list[int]],
    tell: Callable[[int], None] = lambda _: None,
) -> KVScales:
    """Scales by which the largest keys and values of each head fill the range of ``kind``.

    ``model`` is a whole model whose cache has the model's dtype. Each sequence of ids is read
    alone, in one step. ``tell`` hears of the number of tokens of each.

    Raises:
        ValueError: there is no sequence, or a key or value is not finite.
    """
    peaks_L2K: Tensor | None = None
    for ids in sequences:
        mine = torch.stack([_peaks(cache) for cache in read_sequence(model, ids)[1]])
        peaks_L2K = mine if peaks_L2K is None else torch.maximum(peaks_L2K, mine)
        tell(len(ids))
    if peaks_L2K is None:
        raise ValueError("no text to read")
    if not peaks_L2K.isfinite().all():
        raise ValueError("some keys or values are not finite")
    scales_L2K = (peaks_L2K / LARGEST[kind]).clamp(min=_SMALLEST).double().cpu()
    return KVScales(
        kind,
        {
            number: (tuple(keys.tolist()), tuple(values.tolist()))
            for number, (keys, values) in zip(model.layer_numbers(), scales_L2K, strict=True)
        },
    )


def _peaks(cache: Tensor) -> Tensor:
    """The largest magnitudes [2, K] of a cache [blocks, 2, B, K, H]."""
    return cache.abs().amax(dim=(0, 2, 4)).float()


def read_sequence(model: CausalLM, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Run a model over one sequence. Returns the hidden states [T, D], and each layer's cache,
    in which slots without a token are zero."""
    device, count = model.device, len(ids)
    num_blocks = -(-count // _BLOCK_SIZE)
    caches = [
        torch.zeros(num_blocks, *spec.block_shape(_BLOCK_SIZE), dtype=spec.dtype, device=device)
        for spec in model.kv_cache_specs()
    ]
    positions = torch.arange(count, device=device)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        slot_mapping=positions,
        max_query_len=count,
        max_seq_len=count,
        num_decodes=0,
        has_past=False,
    )
    context = ForwardContext(attention=metadata, kv_caches=caches)
    hidden_TD = model.forward(torch.tensor(ids, device=device), positions, context)
    return hidden_TD, caches
