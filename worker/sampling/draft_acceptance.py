"""Draft tokens that are accepted by their probabilities, and not by the model's own draw."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.worker.sampling.draw import Params, probabilities
from trimaran.worker.sampling.noise import gumbel, hash_bits, noise_keys
from trimaran.worker.sampling.sampling_rows import TEMPERATURE, RowFeature, SamplingBatch
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import DraftRule

# Shapes: N sampled rows, n rows in place of draft tokens, V vocabulary, R rows, L longest
# sequence.

Edit = Callable[[Tensor, SamplingBatch, Tensor], None]
"""Applies the processors of a batch to its logits, in place, with the ids so far."""

_COIN, _RESIDUAL = 0x6A09E667F3BCC908, 0xBB67AE8584CAA73B
"""Added to seeds, so that no draw here depends on draws of outputs or of a draft model."""


class DraftAcceptance:
    """The rows of one step that sample in place of draft tokens which have a rule.

    A rule of threshold 0 is rejection sampling (Leviathan et al., 2023; Chen et al., 2023): a
    token x that was drawn with probability q(x) is accepted with probability p(x) / q(x), else
    a token is drawn from max(0, p - q). The token in such a row then has the distribution p,
    which is that of the model under the row's parameters. q is the distribution of the draft
    logits under the same parameters.

    A threshold t above 0 accepts x if p(x) >= t q(x), with p and q before top-k, top-p and
    min-p, and with q(x) = 1 without draft logits. The model's own draw stays in other rows.
    """

    def __init__(self, logits_NV: Tensor, batch: SamplingBatch, rules: list[DraftRule]) -> None:
        """``logits`` are those of the model, before any processor; they are copied."""
        rows = np.concatenate([rule.sampled_rows for rule in rules]).astype(np.int64)
        has_logits = np.concatenate(
            [np.full(len(rule.sampled_rows), rule.logits is not None) for rule in rules]
        )
        self._rules = rules
        self._rows = rows
        self._index_n = to_device(rows, logits_NV.device)
        self._with_q = np.flatnonzero(has_logits)
        self._batch = batch.copy_of(np.concatenate((rows, rows[self._with_q])))
        mine = [logits_NV.index_select(0, self._index_n).float()]
        drafts = [rule.logits for rule in rules if rule.logits is not None]
        if drafts:
            mine.append(to_device(np.concatenate(drafts), logits_NV.device).float())
        self._logits = torch.cat(mine)

    def replace(self, ids_N: Tensor, edit: Edit, token_table_RL: Tensor) -> None:
        """Put accepted draft tokens, and draws from max(0, p - q), in place of own draws."""
        if self._batch.all_features:
            edit(self._logits, self._batch, token_table_RL)
        device = self._logits.device
        drafts_n = to_device(
            np.concatenate([rule.token_ids for rule in self._rules]).astype(np.int64), device
        )
        own_n = ids_N.index_select(0, self._index_n)
        params = Params(self._batch, np.arange(len(self._batch.rows)))
        thresholds = np.repeat(
            np.array([rule.threshold for rule in self._rules], np.float64),
            [len(rule.sampled_rows) for rule in self._rules],
        )
        q_index = to_device(self._with_q, device)
        is_random = self._is_random(thresholds)
        chosen_n = own_n
        if is_random.any():
            is_random_n = to_device(is_random, device)
            chosen_n = self._rejection(params, own_n, drafts_n, q_index, is_random_n)
        if (thresholds > 0).any():
            limits = to_device(thresholds, device)
            is_accepted = self._pass(params, drafts_n, q_index, limits)
            chosen_n = torch.where((limits > 0) & is_accepted, drafts_n, chosen_n)
        ids_N.index_copy_(0, self._index_n, chosen_n)

    def _is_random(self, thresholds: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Rows of rejection sampling: they draw, and have draft logits but no threshold."""
        found = np.zeros(len(self._rows), dtype=bool)
        found[self._with_q] = True
        features = self._batch.features[: len(self._rows)]
        # The top-p of a row with resets is known on the device alone: own draws decide there.
        needs = features & np.uint32(RowFeature.RANDOM | RowFeature.RESET)
        found &= (needs == RowFeature.RANDOM) & (thresholds == 0)
        return found

    def _rejection(
        self,
        params: Params,
        own_n: Tensor,
        drafts_n: Tensor,
        q_index: Tensor,
        is_random_n: Tensor,
    ) -> Tensor:
        every = probabilities(self._logits, params)
        count = len(drafts_n)
        p_nV = every[:count]
        q_nV = torch.zeros_like(p_nV).index_copy_(0, q_index, every[count:])
        p_n, q_n = (each.gather(1, drafts_n[:, None])[:, 0] for each in (p_nV, q_nV))
        is_accepted = self._coins() * q_n < p_n
        residual_nV = (p_nV - q_nV).clamp_(min=0.0)
        noise = gumbel(
            self._keys(_RESIDUAL), torch.arange(p_nV.shape[1], device=p_nV.device)[None]
        )
        drawn_n = noise.double().add_(residual_nV.log()).argmax(dim=-1)
        # A draft token without probability was not drawn from q: the model's own draw decides,
        # which is as exact. NaN compares as false, and ends here too.
        is_valid = is_random_n & (q_n > 0) & (residual_nV.sum(dim=-1) > 0)
        drawn_n = torch.where(is_valid, drawn_n, own_n)
        return torch.where(is_random_n & (q_n > 0) & is_accepted, drafts_n, drawn_n)

    def _pass(
        self, params: Params, drafts_n: Tensor, q_index: Tensor, limits_n: Tensor
    ) -> Tensor:
        """Whether each draft token's probability reaches the threshold, bool [n]."""
        temperature = params.floats[:, TEMPERATURE].astype(np.float64)
        is_drawn = (self._batch.features & np.uint32(RowFeature.RANDOM)) > 0
        scale = to_device(np.where(is_drawn, temperature, 1.0), drafts_n.device)
        every = (self._logits.double() / scale[:, None]).softmax(dim=-1)
        count = len(drafts_n)
        p_n = every[:count].gather(1, drafts_n[:, None])[:, 0]
        q_n = torch.ones_like(p_n)
        if len(q_index):
            ids = drafts_n.index_select(0, q_index)[:, None]
            q_n.index_copy_(0, q_index, every[count:].gather(1, ids)[:, 0])
        return (p_n > 0) & (p_n >= limits_n * q_n)

    def _coins(self) -> Tensor:
        """float64 [n], uniform in (0, 1)."""
        bits = hash_bits(self._keys(_COIN), torch.zeros((1, 1), device=self._logits.device))
        return (bits[:, 0] & 0x7FFFFFFF).double().add_(0.5).mul_(2.0**-31)

    def _keys(self, salt: int) -> Tensor:
        entries = np.arange(len(self._rows))
        rows = self._batch.rows[entries]
        state = self._batch.state
        keys = noise_keys(
            state.seeds[rows] + np.uint64(salt),
            state.sequence_indices[rows],
            self._batch.num_outputs(entries).astype(np.uint64),
        )
        return to_device(keys, self._logits.device)
