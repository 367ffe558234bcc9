"""Shared by all Triton attention: scores of a tile of keys, and the running softmax."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from trimaran.kernels.attention import AttentionSpec

LOG2_E = 1.4426950408889634
LOG2 = tl.constexpr(LOG2_E)


def score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """The factor of products, and the cap, in the form of `softmax_step`, for powers of two."""
    if spec.soft_cap > 0:
        return 2 * LOG2_E * spec.scale / spec.soft_cap, spec.soft_cap * LOG2_E
    return spec.scale * LOG2_E, 0.0


def bias_of(spec: AttentionSpec, unused: Tensor) -> tuple[Tensor, int]:
    """The bias in the form of `load_bias`, and its stride; ``unused`` without a bias."""
    bias = spec.position_bias
    return (unused, 0) if bias is None else (bias, bias.stride(0))


def scales_of(spec: AttentionSpec, unused: Tensor) -> Tensor:
    """The scales of a quantized cache; ``unused`` without scales."""
    return unused if spec.kv_scales is None else spec.kv_scales


def sinks_of(spec: AttentionSpec, unused: Tensor) -> Tensor:
    """The scores of no key; ``unused`` without such scores."""
    return unused if spec.sink_logits is None else spec.sink_logits


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_scales(scales, kv_head, scale, KV_HEADS: tl.constexpr, HAS_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of scores, from ``scale`` and that of a head's keys, and the factor of the
    head's result. The stored numbers are exact in the dtype of queries.
    """
    of_values = 1.0
    if HAS_SCALES:
        scale = scale * tl.load(scales + kv_head)
        of_values = tl.load(scales + KV_HEADS + kv_head)
    return scale, of_values


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_tree(seq_lens, tree_masks, sequence, HAS_TREE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last key of a sequence with one query, and the mask of its tree; see
    `AttentionMetadata.tree_masks`."""
    last = 0
    tree = 0
    if HAS_TREE:
        last = tl.load(seq_lens + sequence) - 1
        tree = tl.load(tree_masks + sequence)
    return last, tree


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def sees(tree, distances, HAS_TREE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a query sees the keys so many places before its own."""
    is_seen = distances >= distances
    if HAS_TREE:
        places = tl.minimum(tl.maximum(distances, 0), 63).to(tl.int64)
        is_seen = (distances > 63) | (((tree >> places) & 1) != 0)
    return is_seen


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def no_keys(ROWS: tl.constexpr, DIMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The maximum, the sum and the weighted values of `softmax_step` before any key."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    return top, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIMS], tl.float32)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def first_sums(sinks, is_counted, q, HAS_SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """`no_keys` for the rows and dims of ``q``; with scores of no key, at the rows' addresses
    ``sinks``, the weights of these scores.
    """
    top, total, acc = no_keys(q.shape[0], q.shape[1])
    if HAS_SINKS:
        top = tl.load(sinks, mask=is_counted, other=float("-inf")) * LOG2
        total = tl.where(is_counted, 1.0, 0.0)
    return top, total, acc


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def weighted_mean(acc, total, of_values, HAS_SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The results of `softmax_step`, with the factor of `load_scales`; 0 without keys."""
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HAS_SCALES:
        result = result * of_values
    return result


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def softmax_weights(  # type: ignore[no-untyped-def]
    scores, is_seen, scale, cap, top, total, HAS_CAP: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """One online softmax step over a tile of keys: the weights, the new maximum and sum, in
    powers of two, and the factor of earlier sums.
    """
    if HAS_CAP:
        # cap * tanh(x / cap) by one exponential of 2 x, which may overflow to infinity.
        scores = cap - 2 * cap / (1 + tl.exp2(scores * scale))
        scale = 1.0
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = new_top
    if IS_MASKED:
        # A row may not have seen any key yet: keep its exponents finite.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * scale - shift[:, None])
    decay = tl.exp2(top - shift)
    return weights, new_top, total * decay + tl.sum(weights, 1), decay


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def bias_rows(bias, stride, kv_head, heads, is_head, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The offsets of the biases of rows of heads; of each row, or one for all."""
    if GROUP == 1:
        first = tl.zeros([1, 1], tl.int32) + kv_head
    else:
        first = tl.where(is_head, heads, 0)[:, None]
    return bias + first * stride


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def load_bias(rows, keys, is_key, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bias that `softmax_step` adds to the scores of a tile of keys, for powers of two."""
    raised = 0.0
    if HAS_BIAS:
        raised = tl.load(rows + keys[None, :], mask=is_key[None, :], other=0.0) * LOG2
    return raised


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def softmax_step(  # type: ignore[no-untyped-def]
    q, k, v, is_seen, bias, scale, cap, top, total, acc, HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the running maximum, sum and weighted values, in powers of two."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_BIAS:
        scores = scores * scale + bias
        scale = 1.0
    weights, top, total, decay = softmax_weights(
        scores, is_seen, scale, cap, top, total, HAS_CAP, IS_MASKED
    )
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return top, total, acc
