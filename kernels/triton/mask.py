"""Bit masks of the ids that may come next, on a GPU."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

# Shapes: N sampled rows, V vocabulary, M masked rows, W words of 32 bits, ceil(V / 32).

_WORDS = 128


# Both may start anywhere in what was sent; a kernel of its own for some places is not worth it.
@triton.jit(do_not_specialize=["entries", "masks"])  # type: ignore[untyped-decorator,unused-ignore]
def _mask_kernel(  # type: ignore[no-untyped-def]
    logits, entries, masks, vocab_size, num_words, row_stride, WORDS: tl.constexpr
):
    """Program (m, t) covers the ids of the t-th ``WORDS`` words of the m-th masked row."""
    masked = tl.program_id(0)
    row = tl.load(entries + masked).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(masks + masked.to(tl.int64) * num_words + word, mask=word < num_words)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    is_forbidden = ((bits[:, None] >> bit) & 1) == 0
    target = logits + row * row_stride + token
    never = tl.full([WORDS, 32], float("-inf"), tl.float32)
    tl.store(target, never, mask=is_forbidden & (token < vocab_size))


def apply_masks(logits_NV: Tensor, entries_M: Tensor, masks_MW: Tensor) -> None:
    """Mask what may not come in float32 ``logits``, in place.

    Row ``entries[m]`` (int64) keeps id i if bit i % 32 of ``masks[m, i // 32]`` (int32) is
    set. The twin is `logits_processors.apply_masks`.
    """
    num_words = masks_MW.shape[1]
    _mask_kernel[(len(entries_M), triton.cdiv(num_words, _WORDS))](
        logits_NV, entries_M, masks_MW, logits_NV.shape[1], num_words, logits_NV.stride(0),
        WORDS=_WORDS,
    )  # fmt: skip
