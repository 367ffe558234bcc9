"""Every operator in plain torch, for the tests to compare the fast backends with.

`operators.Ops` declares what each function of the same name computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trimaran.kernels.attention import (
    TREE_BITS,
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    LatentHeads,
)
from trimaran.kernels.kv_quantization import (
    KEY,
    KEY_INVERSE,
    VALUE,
    VALUE_INVERSE,
    as_bytes,
    quantize_heads,
)
from trimaran.kernels.routing import (
    ExpertCounter,
    ExpertForm,
    ExpertRouting,
    ExpertSlotTable,
)

# Shapes: T tokens, D and E widths, S sequences, M blocks of the longest sequence, Q queries
# of the longest sequence, L its tokens, B tokens of a block, N query heads, K key-value
# heads, G = N / K, H head size, P positions, X experts, C experts of a token, F = E / 2;
# of experts: G groups, S experts of a group.

OPERATORS = (
    "linear", "fp8_product", "integer_product", "head_linear", "add_linear", "gated_linear",
    "logits", "rms_norm", "add_rms_norm", "norm_heads", "layer_norm", "add_layer_norm",
    "silu_and_mul", "gelu_and_mul", "activation", "embed", "rope_and_cache",
    "rope_and_cache_latent", "write_kv", "paged_attention", "latent_attention",
    "router_logits", "choose_experts", "expert_mlp", "fp8_expert_mlp",
    "integer_expert_mlp",
)  # fmt: skip
"""The operators that `Ops.backends` names, in the order of the log."""

WEIGHT_EPSILON = 1e-20
"""Added to the sum that a token's weights are divided by: sigmoids may all be zero."""

_POSITIVE = 0x7FFFFFFF

_QUERY_TILE = 256
"""Queries of a sequence that attention takes at once: bounds the memory for scores."""


def linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    return F.linear(x_TD, weight_ED, bias_E)


def gated_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return silu_and_mul(F.linear(x_TD, weight_ED))


def logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """The product as float32."""
    return F.linear(x_TD, weight_ED).float()


def head_linear(x_TNH: Tensor, weight_NED: Tensor) -> Tensor:
    width = weight_NED.shape[2]
    product_TNE = torch.einsum("tnd,ned->tne", x_TNH[..., :width], weight_NED)
    if x_TNH.shape[2] == width:
        return product_TNE
    return torch.cat((product_TNE, x_TNH[..., width:]), dim=-1)


def add_linear(x_TD: Tensor, weight_ED: Tensor, residual_TE: Tensor) -> Tensor | None:
    """Always adds; returns None."""
    residual_TE.addmm_(x_TD, weight_ED.T)
    return None


def linear_parts(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return F.linear(x_TD, weight_ED)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    x = x_TD.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (x * scale * weight_D.float()).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    residual_TD += x_TD if x_TD.dim() == 2 else x_TD.sum(0)
    return rms_norm(residual_TD, weight_D, eps)


def norm_heads(
    heads_TAH: Tensor, query_weight_H: Tensor, key_weight_H: Tensor, num_kv: int, eps: float
) -> None:
    query, key = heads_TAH[:, : -2 * num_kv], heads_TAH[:, -2 * num_kv : -num_kv]
    query.copy_(rms_norm(query, query_weight_H, eps))
    key.copy_(rms_norm(key, key_weight_H, eps))


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x_TD, (x_TD.shape[-1],), weight_D, bias_D, eps)


def add_layer_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> Tensor:
    residual_TD += x_TD
    return layer_norm(residual_TD, weight_D, bias_D, eps)


def silu_and_mul(gate_up_TE: Tensor) -> Tensor:
    gate, up = gate_up_TE.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_TE.dtype)


def clamped_swiglu(gate_up_TE: Tensor, alpha: float, limit: float) -> Tensor:
    """See `ExpertForm`; in float32, rounded once."""
    gate, up = gate_up_TE.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * sigmoid(alpha * gate) * (up + 1)).to(gate_up_TE.dtype)


def gelu_and_mul(gate_up_TE: Tensor, name: str) -> Tensor:
    gate, up = gate_up_TE.float().chunk(2, dim=-1)
    if name == "gelu":
        # A single token's half is contiguous, and torch's CPU has another kernel for contiguous
        # input. All halves are made contiguous so that the batch size does not change a token.
        gate = gate.contiguous()
    return (activation(gate, name) * up).to(gate_up_TE.dtype)


def activation(x_TD: Tensor, name: str) -> Tensor:
    if name == "relu":
        return F.relu(x_TD)
    return F.gelu(x_TD, approximate="none" if name == "gelu" else "tanh")


def sigmoid(x_TX: Tensor) -> Tensor:
    """The sigmoid of each number, computed as the softmax of the number and zero.

    On a CPU, torch's own sigmoid rounds the last numbers of a tensor, fewer than a vector
    register holds, unlike the numbers before them: a result would depend on the token's row.
    """
    return torch.softmax(F.pad(x_TX[..., None], (0, 1)), dim=-1)[..., 0]


def router_logits(x_TD: Tensor, weight_XD: Tensor) -> Tensor:
    return F.linear(x_TD.float(), weight_XD.float())


def choose_experts(
    logits_TX: Tensor,
    routing: ExpertRouting,
    bias_X: Tensor | None = None,
    counter: ExpertCounter | None = None,
    table: ExpertSlotTable | None = None,
) -> tuple[Tensor, Tensor]:
    values = logits_TX.float()
    is_softmax = routing.scoring == "softmax"
    scores_TX = torch.softmax(values, dim=-1) if is_softmax else sigmoid(values)
    ranked_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if routing.num_groups > 1:
        ranked_TX = _leave_best_groups(ranked_TX, routing)
    ids = ranked_TX.topk(routing.num_chosen, dim=-1)[1]
    weights = scores_TX.gather(1, ids)
    if routing.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + WEIGHT_EPSILON)
    if counter is not None:
        _count(ids, counter)
    if table is not None:
        ids = _slots_of(ids, values, table)
    return weights * routing.scaling, ids.to(torch.int32)


def _slots_of(ids_TC: Tensor, logits_TX: Tensor, table: ExpertSlotTable) -> Tensor:
    # The last bits of a logit serve as random bits that do not depend on the token's row.
    drawn_T1 = logits_TX[:, :1].contiguous().view(torch.int32) & _POSITIVE
    choices_C = torch.arange(ids_TC.shape[1], device=ids_TC.device)
    copies_TC = (drawn_T1.long() + choices_C) % table.num_copies[ids_TC]
    return table.slots[ids_TC, copies_TC]


def _count(ids_TC: Tensor, counter: ExpertCounter) -> None:
    is_real_TC = torch.ones_like(ids_TC)
    if counter.num_tokens is not None:
        tokens = torch.arange(ids_TC.shape[0], device=ids_TC.device)
        is_real_TC *= (tokens < counter.num_tokens).unsqueeze(1)
    counter.counts.index_add_(0, ids_TC.flatten(), is_real_TC.flatten())


def _leave_best_groups(ranked_TX: Tensor, routing: ExpertRouting) -> Tensor:
    """``ranked``, minus infinity outside of each token's best groups."""
    groups_TGS = ranked_TX.view(ranked_TX.shape[0], routing.num_groups, -1)
    totals_TG = groups_TGS.topk(routing.num_ranked, dim=-1)[0].sum(dim=-1)
    best = totals_TG.topk(routing.num_chosen_groups, dim=-1)[1]
    is_left_TG = torch.zeros_like(totals_TG, dtype=torch.bool).scatter(1, best, True)
    return groups_TGS.masked_fill(~is_left_TG.unsqueeze(-1), float("-inf")).view_as(ranked_TX)


def expert_mlp(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    gate_up_XED: Tensor,
    down_XDF: Tensor,
    first_expert: int = 0,
    form: ExpertForm | None = None,
    products: tuple[Callable[..., Tensor], ...] = (gated_linear, linear, clamped_swiglu),
) -> Tensor:
    """``products`` are a backend's `gated_linear`, `linear` and `clamped_swiglu`."""
    gated, plain, clamped = products

    def run(expert: int, rows: Tensor) -> Tensor:
        if form is None:
            return plain(gated(rows, gate_up_XED[expert]), down_XDF[expert])
        both = plain(rows, gate_up_XED[expert], form.gate_up_bias[expert])
        inner = clamped(both, form.alpha, form.limit)
        return plain(inner, down_XDF[expert], form.down_bias[expert])

    experts = range(first_expert, first_expert + gate_up_XED.shape[0])
    return sum_experts(x_TD, weights_TC, ids_TC, experts, run)


def sum_experts(
    x_TD: Tensor,
    weights_TC: Tensor,
    ids_TC: Tensor,
    experts: range,
    run: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """The weighted sum of each token's ``experts``; see `Ops.expert_mlp`.

    ``run`` computes the outputs of the n-th of ``experts`` for some rows.
    """
    num_experts, num_chosen = len(experts), ids_TC.shape[1]
    owners = ids_TC.flatten().long() - experts.start
    # Experts of other ranks sort behind all experts of this rank.
    owners = owners.where((owners >= 0) & (owners < num_experts), num_experts)
    order = owners.argsort(stable=True)
    counts = owners.bincount(minlength=num_experts + 1).tolist()
    outputs = x_TD.new_zeros((owners.shape[0], x_TD.shape[1]), dtype=torch.float32)
    first = 0
    for expert, count in enumerate(counts[:num_experts]):
        if count:
            assignments = order[first : first + count]
            outputs[assignments] = run(expert, x_TD[assignments // num_chosen]).float()
        first += count
    outputs_TCD = outputs.view(x_TD.shape[0], num_chosen, -1)
    total = outputs_TCD[:, 0] * weights_TC[:, :1]
    for choice in range(1, num_chosen):
        # Product and sum stay apart: a fused operation rounds differently at the end of a row.
        total += outputs_TCD[:, choice] * weights_TC[:, choice : choice + 1]
    return total.to(x_TD.dtype)


def embed(ids_T: Tensor, table_VD: Tensor, first_row: int | None = None) -> Tensor:
    if first_row is None:
        return F.embedding(ids_T, table_VD)
    rows = ids_T - first_row
    is_elsewhere = (rows < 0) | (rows >= table_VD.shape[0])
    vectors = F.embedding(rows.masked_fill(is_elsewhere, 0), table_VD)
    return vectors.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)


def rotate(
    x_TNH: Tensor, cos_sin_PR: Tensor, positions_T: Tensor, is_neox: bool = True
) -> None:
    """Rotate the first R dims of each head by its position's angles, in place.

    ``cos_sin`` is float32: the first half of a row holds cosines, the second sines. Angle i
    turns dims i and i + R / 2, or 2 i and 2 i + 1 without ``is_neox``.
    """
    cos, sin = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    rotated = x_TNH[..., : cos_sin_PR.shape[1]]
    if is_neox:
        first, second = rotated.float().chunk(2, dim=-1)
    else:
        first, second = rotated.float().reshape(*rotated.shape[:-1], -1, 2).unbind(-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rotated.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))


def rope_and_cache(
    heads_TAH: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    is_neox: bool = True,
    scales_4K: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> None:
    num_kv = kv_cache.shape[3]
    if norms is not None:
        norm_heads(heads_TAH, norms.query, norms.key, num_kv, norms.eps)
    rotate(heads_TAH[:, :-num_kv], cos_sin_PR, positions_T, is_neox)
    key_TKH, value_TKH = heads_TAH[:, -2 * num_kv : -num_kv], heads_TAH[:, -num_kv:]
    write_kv(key_TKH, value_TKH, kv_cache, slots_T, scales_4K)


def rope_and_cache_latent(
    query_TNH: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    is_neox: bool = True,
) -> None:
    rotate(query_TNH[..., -key_TR.shape[1] :], cos_sin_PR, positions_T, is_neox)
    rotate(key_TR.unsqueeze(1), cos_sin_PR, positions_T, is_neox)
    block_size = kv_cache.shape[2]
    blocks = torch.div(slots_T, block_size, rounding_mode="floor")
    vectors_TH = torch.cat((latent_TL, key_TR), dim=-1)
    kv_cache[:, 0, :, 0][blocks, slots_T - blocks * block_size] = vectors_TH


def write_kv(
    key_TKH: Tensor,
    value_TKH: Tensor,
    kv_cache: Tensor,
    slots_T: Tensor,
    scales_4K: Tensor | None = None,
) -> None:
    block_size, dtype = kv_cache.shape[2], kv_cache.dtype
    if scales_4K is not None:
        key_TKH = quantize_heads(key_TKH, scales_4K[KEY_INVERSE], dtype)
        value_TKH = quantize_heads(value_TKH, scales_4K[VALUE_INVERSE], dtype)
        kv_cache, key_TKH, value_TKH = map(as_bytes, (kv_cache, key_TKH, value_TKH))
    blocks = torch.div(slots_T, block_size, rounding_mode="floor")
    offsets = slots_T - blocks * block_size
    kv_cache[:, 0][blocks, offsets] = key_TKH
    kv_cache[:, 1][blocks, offsets] = value_TKH


def paged_attention(
    query_TNH: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    """Vectorised over sequences, without a wait for the device.

    The leading decode rows are padded to the longest of them, and so are the rows behind them.
    """
    num_tokens, num_heads, head_size = query_TNH.shape
    output = query_TNH.new_empty((num_tokens, num_heads, spec.latent_size or head_size))
    for tokens, part in metadata.parts():
        output[tokens] = _attend_padded(query_TNH[tokens], kv_cache, part, spec)
    return output


def latent_attention(
    query_TNH: Tensor,
    latent_TL: Tensor,
    key_TR: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    heads: LatentHeads,
    parts: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (head_linear, paged_attention),
) -> Tensor:
    """All rows attend to latent vectors.

    ``parts`` are a backend's `head_linear` and `paged_attention`.
    """
    multiply, attend = parts
    absorbed = multiply(query_TNH, heads.key_up)
    return multiply(attend(absorbed, kv_cache, metadata, spec), heads.value_up)


def _attend_padded(
    query_TNH: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, spec: AttentionSpec
) -> Tensor:
    num_tokens, num_heads, _ = query_TNH.shape
    tables = metadata.tables()
    starts = metadata.query_start_loc[:-1].long()
    ends = metadata.query_start_loc[1:].long()
    past = metadata.seq_lens.long() - (ends - starts)
    keys, values = _gather_kv(kv_cache, metadata, tables, past, spec)
    if spec.latent_size:
        values = keys[..., : spec.latent_size]
    most = metadata.max_query_len
    tiles = []
    for first in range(0, most, _QUERY_TILE):
        offsets = torch.arange(first, min(first + _QUERY_TILE, most), device=query_TNH.device)
        rows = (starts[:, None] + offsets).clamp(max=num_tokens - 1)
        masks = metadata.tree_masks if metadata.num_decodes else None
        positions = past[:, None] + offsets
        tiles.append(_attend(query_TNH[rows], keys, values, positions, spec, masks))
    padded = torch.cat(tiles, dim=1)
    tokens = torch.arange(num_tokens, device=query_TNH.device)
    sequences = torch.searchsorted(ends, tokens, right=True)
    # Padding tokens behind the last sequence read an arbitrary row; their results are unused.
    sequences = sequences.clamp(max=starts.shape[0] - 1)
    offsets = (tokens - starts[sequences]).clamp(max=most - 1)
    return padded[sequences, offsets].reshape(num_tokens, num_heads, values.shape[-1])


def _gather_kv(
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    block_tables: Tensor,
    past_S: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """Keys and values [S, L, K, H] as float32, zero for tokens that all queries mask."""
    block_size, seq_lens = kv_cache.shape[2], metadata.seq_lens
    num_blocks = -(-metadata.max_seq_len // block_size)
    starts = torch.arange(num_blocks, device=kv_cache.device) * block_size
    tables = block_tables[:, :num_blocks].long()
    tables = torch.where(starts < seq_lens[:, None], tables, 0)
    gathered = as_bytes(kv_cache)[tables].view(kv_cache.dtype)
    keys = gathered[:, :, 0].flatten(1, 2).float()
    values = gathered[:, :, -1].flatten(1, 2).float()
    if spec.kv_scales is not None:
        keys = keys * spec.kv_scales[KEY][:, None]
        values = values * spec.kv_scales[VALUE][:, None]
    tokens = torch.arange(keys.shape[1], device=kv_cache.device)
    # Blocks without an owner and other sequences' blocks may hold NaN; zero times NaN is NaN.
    is_outside = tokens >= seq_lens[:, None]
    if spec.window > 0:
        is_past = tokens <= past_S[:, None] - spec.window
        is_outside |= is_past & (tokens >= spec.num_sinks)
    is_outside = is_outside[:, :, None, None]
    return keys.masked_fill(is_outside, 0.0), values.masked_fill(is_outside, 0.0)


def _attend(
    query_SQNH: Tensor,
    key_SLKH: Tensor,
    value_SLKH: Tensor,
    position_SQ: Tensor,
    spec: AttentionSpec,
    tree_masks_S: Tensor | None = None,
) -> Tensor:
    num_sequences, num_queries, _, head_size = query_SQNH.shape
    groups = (num_sequences, num_queries, key_SLKH.shape[2], -1, head_size)
    query = query_SQNH.float().view(groups) * spec.scale
    scores = torch.einsum("sqkgh,slkh->sqkgl", query, key_SLKH)
    if spec.soft_cap > 0:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    tokens = torch.arange(key_SLKH.shape[1], device=scores.device)
    if spec.position_bias is not None:
        # The last block may extend beyond the last position.
        columns = tokens.clamp(max=spec.position_bias.shape[1] - 1)
        scores += spec.position_bias[:, columns].view(*scores.shape[2:])
    is_hidden = tokens > position_SQ[:, :, None]
    if spec.window > 0:
        is_past = tokens <= position_SQ[:, :, None] - spec.window
        is_hidden |= is_past & (tokens >= spec.num_sinks)
    if tree_masks_S is not None:
        distances = position_SQ[:, :, None] - tokens
        bits = tree_masks_S[:, None, None] >> distances.clamp(0, TREE_BITS - 1) & 1
        is_hidden |= (distances >= 0) & (distances < TREE_BITS) & (bits == 0)
    scores = scores.masked_fill(is_hidden[:, :, None, None, :], float("-inf"))
    weights = _softmax_of_keys(scores, spec.sink_logits)
    output = torch.einsum("sqkgl,slkh->sqkgh", weights, value_SLKH)
    return output.flatten(2, 3).to(query_SQNH.dtype)


def _softmax_of_keys(scores_SQKGL: Tensor, sink_logits_N: Tensor | None) -> Tensor:
    """The softmax over keys; with sinks in the denominator, the weights' sum is below 1."""
    if sink_logits_N is None:
        return torch.softmax(scores_SQKGL, dim=-1)
    shape = (*scores_SQKGL.shape[:-1], 1)
    sinks = sink_logits_N.view(1, 1, *shape[2:]).expand(shape)
    return torch.softmax(torch.cat((scores_SQKGL, sinks), dim=-1), dim=-1)[..., :-1]
