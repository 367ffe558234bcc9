"""Every row's sampling parameters, and the processors that the rows of one step need."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.messages.sampling_params import SamplingParams
from trimaran.kernels.cpu.sampling import CpuSampling
from trimaran.worker.sampling.bad_words import BadWords, pack_bad_words
from trimaran.worker.sampling.beam_search import num_candidates
from trimaran.worker.sampling.candidates import argmax
from trimaran.worker.sampling.device_sampling_state import DeviceSamplingState
from trimaran.worker.sampling.ngram_index import NgramIndex
from trimaran.worker.sampling.noise import noise_keys
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import DraftRule, Int32Array, NewRow


class RowFeature(IntFlag):
    """A row's needs beyond the likeliest id."""

    RANDOM = 1
    PENALTY = 2
    MIN_TOKENS = 4
    BAD_WORDS = 8
    NGRAM = 16
    BIAS = 32
    LOG_PROBS = 64
    FILTER = 128
    """Top-k, top-p or min-p of a random row."""
    LOGITS = 256
    """Its logits are returned: they must be whole, and computed before an id is chosen."""
    GUIDE = 512
    """The ids are restricted to the step's masks."""
    BEAM = 1024
    """Its likeliest ids, among which the host selects."""
    RESET = 2048
    """An id of the output resets its decayed top-p."""


# Columns of the float and integer parameters.
(
    TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, TOP_P_DECAY, TOP_P_MIN,
) = range(8)  # fmt: skip
TOP_K, MIN_TOKENS, END_ID, NGRAM, RESET = range(5)

FORBIDS = RowFeature.BIAS | RowFeature.NGRAM | RowFeature.BAD_WORDS | RowFeature.GUIDE
"""Needs that may forbid ids, and alone or together all of them."""


READS_IDS = (
    RowFeature.PENALTY | RowFeature.NGRAM | RowFeature.BAD_WORDS | RowFeature.RESET
)  # fmt: skip
"""Needs that depend on the ids before the sampled one."""


def features_of(params: SamplingParams) -> RowFeature:
    """The processors that a request needs."""
    features = RowFeature(0)
    if params.beam_width > 1:
        features |= RowFeature.BEAM
    elif not params.is_greedy:
        features |= RowFeature.RANDOM
        if params.top_k > 0 or 0 < params.top_p < 1 or params.min_p > 0:
            features |= RowFeature.FILTER
        if 0 < params.top_p < 1 and params.top_p_decay < 1 and params.top_p_reset_ids >= 0:
            features |= RowFeature.RESET
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != (1.0, 0.0, 0.0):
        features |= RowFeature.PENALTY
    if params.min_tokens > 1 and (params.end_id >= 0 or params.end_ids):
        features |= RowFeature.MIN_TOKENS
    if any(params.bad_words):
        features |= RowFeature.BAD_WORDS
    if params.no_repeat_ngram_size > 0:
        features |= RowFeature.NGRAM
    if params.embedding_bias:
        features |= RowFeature.BIAS
    if params.return_log_probs and params.beam_width == 1:
        features |= RowFeature.LOG_PROBS
    if params.return_generation_logits:
        features |= RowFeature.LOGITS
    if params.guide_type:
        features |= RowFeature.GUIDE
    return features


@dataclass(slots=True)
class SamplingBatch:
    """The needs of one step's sampled rows. Arrays are on the host, [N, ...]."""

    rows: Int32Array
    lengths: Int32Array
    """Tokens before the sampled one."""

    features: npt.NDArray[np.uint32]
    all_features: int
    """Union of ``features``."""

    state: SamplingRows
    device_rows: Tensor | None = None
    """``rows`` on a GPU."""

    id_rows: Tensor | None = None
    """int32 [N] on the device: the row of each entry in the token table; None for ``rows``.
    Rows of drafts in a tree each have ids of their own."""

    device_lengths: Tensor | None = None
    """``lengths`` on a GPU."""

    token_table: Tensor | None = None
    """[R, L]: every row's ids so far, if some row asks for `RowFeature.RESET`."""

    masks: Tensor | None = None
    """int32 [n, ceil(V / 32)] on the device: the allowed ids of each row with a guide."""

    draft_rules: list[DraftRule] = field(default_factory=list)
    """Draft tokens that more than the own draw decides about; see `draft_acceptance`."""

    def table_rows(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """On the CPU: the rows of these entries in the token table."""
        rows = self.rows if self.id_rows is None else self.id_rows.numpy()
        found: npt.NDArray[np.int64] = rows[entries].astype(np.int64)
        return found

    def rows_wanting(self, feature: RowFeature) -> npt.NDArray[np.int64]:
        """Entries that ask for ``feature``, ascending."""
        return np.flatnonzero(self.features & np.uint32(feature))

    def beyond_plain(self) -> npt.NDArray[np.int64]:
        """Entries that need more than the likeliest id or a plain draw, ascending."""
        return np.flatnonzero(self.features & ~np.uint32(RowFeature.RANDOM))

    @property
    def is_mostly_plain(self) -> bool:
        """Whether it pays to gather logits of the rows that need more than a plain draw, alone.
        False if logits of a row are to be kept."""
        if self.draft_rules:
            return False
        if not self.all_features & ~RowFeature.RANDOM:
            return True
        is_kept = self.all_features & RowFeature.LOGITS
        return not is_kept and 2 * len(self.beyond_plain()) <= len(self.rows)

    def at(self, entries: npt.NDArray[np.int64], index_n: Tensor) -> SamplingBatch:
        """A batch of these entries, on a GPU; ``index`` holds the entries on the device.

        They are ascending, and contain a contiguous range of the entries with guides.
        """
        assert self.device_rows is not None
        assert self.device_lengths is not None
        features, masks = self.features[entries], self.masks
        if masks is not None:
            first = np.count_nonzero(self.features[: entries[0]] & RowFeature.GUIDE)
            masks = masks[first : first + np.count_nonzero(features & RowFeature.GUIDE)]
        return SamplingBatch(
            self.rows[entries],
            self.lengths[entries],
            features,
            int(np.bitwise_or.reduce(features)),
            self.state,
            self.device_rows.index_select(0, index_n),
            self.id_rows if self.id_rows is None else self.id_rows.index_select(0, index_n),
            self.device_lengths.index_select(0, index_n),
            masks=masks,
        )

    def copy_of(self, entries: npt.NDArray[np.int64]) -> SamplingBatch:
        """A batch of these entries, in any order and with repetitions."""
        features, masks = self.features[entries], self.masks
        if masks is not None:
            has_guide = (self.features & np.uint32(RowFeature.GUIDE)) > 0
            index = np.cumsum(has_guide)[entries[has_guide[entries]]] - 1
            masks = masks[to_device(index, self.state.device)]
        rows, lengths = self.rows[entries], self.lengths[entries]
        has_device = self.device_rows is not None
        id_rows = self.id_rows
        if id_rows is not None:
            id_rows = id_rows[to_device(entries, self.state.device)]
        return SamplingBatch(
            rows,
            lengths,
            features,
            int(np.bitwise_or.reduce(features)),
            self.state,
            to_device(rows, self.state.device) if has_device else None,
            id_rows,
            to_device(lengths, self.state.device) if has_device else None,
            self.token_table,
            masks,
        )

    def without(self, entries: npt.NDArray[np.int64], index_n: Tensor) -> SamplingBatch:
        """On a GPU: the batch with row -1, which needs nothing, in place of these entries.

        No guide may be left in the batch.
        """
        assert self.device_rows is not None
        features = self.features.copy()
        features[entries] = 0
        return SamplingBatch(
            self.rows,
            self.lengths,
            features,
            int(np.bitwise_or.reduce(features)),
            self.state,
            self.device_rows.index_fill(0, index_n, -1),
            None,
            self.device_lengths,
        )

    def floats(self, entries: npt.NDArray[np.int64]) -> Tensor:
        """float32 [n, 8] on the device, columns by name above."""
        return to_device(self.state.float_params[self.rows[entries]], self.state.device)

    def ints(self, entries: npt.NDArray[np.int64]) -> Tensor:
        """int64 [n, 5] on the device."""
        return to_device(self.state.int_params[self.rows[entries]], self.state.device)

    def index(self, entries: npt.NDArray[np.int64]) -> Tensor:
        """``entries`` on the device."""
        return to_device(entries, self.state.device)

    def num_outputs(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Output tokens before the sampled one."""
        rows = self.rows[entries]
        outputs: npt.NDArray[np.int64] = self.lengths[entries] - self.state.num_prompt[rows]
        return outputs

    def keys(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """int32 [n, 2]: the noise's key of each row at its output position."""
        rows = self.rows[entries]
        return noise_keys(
            self.state.seeds[rows],
            self.state.sequence_indices[rows],
            self.num_outputs(entries).astype(np.uint64),
        )


class SamplingRows:
    """The sampling parameters of all rows, written when a row is entered."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        kernel: CpuSampling | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.kernel = kernel
        """The kernel that samples on a CPU; None means torch."""
        self.float_params = np.zeros((num_rows, 8), dtype=np.float32)
        self.int_params = np.zeros((num_rows, 5), dtype=np.int64)
        self.seeds = np.zeros(num_rows, dtype=np.uint64)
        self.sequence_indices = np.zeros(num_rows, dtype=np.uint64)
        self.num_prompt = np.zeros(num_rows, dtype=np.int64)
        self.num_candidates = np.zeros(num_rows, dtype=np.int64)
        """The number of likeliest ids that the host needs, for rows that are beams."""
        self.bad_words: dict[int, BadWords] = {}
        """On the CPU, the bad words of rows that have any; see
        `logits_processors.forbid_bad_words`."""
        self.end_ids: dict[int, tuple[int, ...]] = {}
        """The further end ids of rows that have any."""
        self.ngrams: dict[int, NgramIndex] = {}
        """On the CPU, the n-grams of rows that may not repeat any; see
        `logits_processors.forbid_repeated_ngrams`."""
        self.biases: dict[int, Tensor] = {}
        self._features = np.zeros(num_rows, dtype=np.uint32)
        self.device_state: DeviceSamplingState | None = None
        if device.type == "cuda":
            self.device_state = DeviceSamplingState(num_rows, device)

    def likeliest(self, logits_NV: Tensor) -> Tensor:
        """The first of the ids of highest logit in each row, int64 [N]."""
        return argmax(logits_NV) if self.kernel is None else self.kernel.argmax(logits_NV)

    def leave(self, row: int) -> None:
        """Clear the parameters of a row whose sequence left."""
        self._features[row] = 0
        self.ngrams.pop(row, None)

    def enter(self, new: NewRow) -> None:
        """Set a row's parameters from those of its new sequence."""
        params, row = SamplingParams.from_wire(new.sampling), new.row
        self._features[row] = features_of(params)
        # A repetition penalty of 0 or less is refused at submission.
        self.float_params[row] = (
            params.temperature,
            params.top_p if params.top_p > 0 else 1.0,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.top_p_decay if params.top_p > 0 else 1.0,
            params.top_p_min,
        )
        self.int_params[row] = (
            params.top_k,
            params.min_tokens,
            params.end_id,
            params.no_repeat_ngram_size,
            params.top_p_reset_ids,
        )
        self.seeds[row] = params.seed
        self.sequence_indices[row] = new.sequence_index
        self.num_prompt[row] = new.num_prompt_tokens
        if params.beam_width > 1:
            self.num_candidates[row] = num_candidates(params)
        if self.device_state is not None:
            self.device_state.enter(new, params)
        self.bad_words.pop(row, None)
        self.end_ids.pop(row, None)
        self.ngrams.pop(row, None)
        self.biases.pop(row, None)
        if params.no_repeat_ngram_size > 0 and self.device_state is None:
            self.ngrams[row] = NgramIndex(params.no_repeat_ngram_size)
        if any(params.bad_words) and self.device_state is None:
            self.bad_words[row] = pack_bad_words(params.bad_words)
        if params.end_ids:
            self.end_ids[row] = params.end_ids
        if params.embedding_bias:
            bias = np.frombuffer(params.embedding_bias, dtype="<f4").copy()
            self.biases[row] = to_device(bias, self.device)

    def needs(self, rows: Int32Array) -> int:
        """The union of the rows' features."""
        return int(np.bitwise_or.reduce(self._features[rows]))

    def rewrite(self, row: int, start: int) -> None:
        """Take note that a row's ids from ``start`` on may have changed."""
        if row in self.ngrams:
            self.ngrams[row].rewrite(start)

    def batch(
        self,
        rows: Int32Array,
        lengths: Int32Array,
        device_rows: Tensor | None = None,
        device_lengths: Tensor | None = None,
    ) -> SamplingBatch:
        """The needs of one step's sampled ``rows``, whose sequences are ``lengths`` tokens
        long.

        The last two arguments are the same arrays on the device, if they are there already.
        """
        features = self._features[rows]
        all_features = int(np.bitwise_or.reduce(features))
        return SamplingBatch(
            rows, lengths, features, all_features, self, device_rows, None, device_lengths
        )
