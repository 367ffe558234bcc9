"""Paged attention on a GPU: decodes and prompt chunks by separate kernels."""

from __future__ import annotations

from torch import Tensor

from trimaran.kernels.attention import AttentionMetadata, AttentionSpec
from trimaran.kernels.decode_attention import DecodeAttention, TritonDecodes
from trimaran.kernels.prompt_attention import PromptAttention, TritonPrompts
from trimaran.kernels.triton.attention import latent_decode as triton_latent_decode
from trimaran.kernels.triton.attention import latent_prefill as triton_latent_prefill

_DECODES = TritonDecodes()
_PROMPTS = TritonPrompts()


def paged_attention(
    query_TNH: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    *,
    is_deterministic: bool = False,
    decodes: DecodeAttention = _DECODES,
    prompts: PromptAttention = _PROMPTS,
) -> Tensor:
    """Causal attention of each sequence's last tokens; see `Ops.paged_attention`.

    A step of decodes alone is safe under CUDA graph capture. With ``is_deterministic`` a
    sequence's result does not depend on the other sequences. ``decodes`` serves the leading
    decodes, ``prompts`` the sequences behind them; latent vectors have separate kernels.
    """
    num_decodes, (num_tokens, num_heads, head_size) = metadata.num_decodes, query_TNH.shape
    output = query_TNH.new_empty((num_tokens, num_heads, spec.latent_size or head_size))
    attend_decodes = triton_latent_decode.decode if spec.latent_size else decodes
    attend_prompts = triton_latent_prefill.prefill if spec.latent_size else prompts
    if num_decodes:
        attend_decodes(
            query_TNH[:num_decodes], kv_cache, metadata, spec, output,
            is_fixed=is_deterministic,
        )  # fmt: skip
    if num_decodes < metadata.seq_lens.shape[0]:
        attend_prompts(query_TNH, kv_cache, metadata, spec, output)
    return output
