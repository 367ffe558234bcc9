"""Sampling parameters and bad words of all rows in GPU memory, where the kernels read them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trimaran.comm.messages.sampling_params import MIN_TEMPERATURE, SamplingParams
from trimaran.kernels import sampling_state
from trimaran.worker.sampling.bad_words import DeviceBadWords, pack_bad_words
from trimaran.worker.steps.staging import to_device
from trimaran.worker.steps.step_types import NewRow

_INT32_MAX = (1 << 31) - 1


class DeviceSamplingState:
    """The state of every row for a GPU's kernels, by the columns of `sampling_state`."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._tensor = torch.zeros(
            (num_rows, sampling_state.WIDTH), dtype=torch.int32, device=device
        )
        self.bad_words: dict[int, DeviceBadWords] = {}
        """The bad words of rows that have any; see `triton_logits.forbid_bad_words`."""
        self._entered: dict[int, npt.NDArray[np.int32]] = {}
        self._counts: Tensor | None = None

    def enter(self, new: NewRow, params: SamplingParams) -> None:
        """Record the parameters of a row's sequence; temperature 0 asks for the likeliest
        id."""
        words = np.zeros(sampling_state.WIDTH, dtype=np.int32)
        floats = words.view(np.float32)
        words[: sampling_state.SEQUENCE].view(np.uint64)[0] = params.seed
        words[sampling_state.SEQUENCE] = new.sequence_index
        words[sampling_state.NUM_PROMPT] = new.num_prompt_tokens
        if not params.is_greedy and params.beam_width == 1:
            floats[sampling_state.TEMPERATURE] = max(params.temperature, MIN_TEMPERATURE)
        words[sampling_state.TOP_K] = min(params.top_k, _INT32_MAX)
        floats[sampling_state.TOP_P] = params.top_p if params.top_p > 0 else 1.0
        floats[sampling_state.MIN_P] = params.min_p
        floats[sampling_state.TOP_P_DECAY] = params.top_p_decay if params.top_p > 0 else 1.0
        floats[sampling_state.TOP_P_MIN] = params.top_p_min
        floats[sampling_state.REPETITION] = params.repetition_penalty
        floats[sampling_state.PRESENCE] = params.presence_penalty
        floats[sampling_state.FREQUENCY] = params.frequency_penalty
        words[sampling_state.MIN_TOKENS] = min(params.min_tokens, _INT32_MAX)
        words[sampling_state.END_ID] = params.end_id
        first = sampling_state.END_IDS
        words[first:] = -1
        words[first : first + len(params.end_ids)] = params.end_ids
        words[sampling_state.NGRAM] = min(params.no_repeat_ngram_size, _INT32_MAX)
        self._entered[new.row] = words
        self.bad_words.pop(new.row, None)
        if any(params.bad_words):
            packed = pack_bad_words(params.bad_words)
            self.bad_words[new.row] = DeviceBadWords.of(packed, self._tensor.device)

    def counts(self, size: int) -> Tensor:
        """int32 zeros for at least ``size`` numbers; the user must leave them as zeros."""
        if self._counts is None or len(self._counts) < size:
            self._counts = torch.zeros(size, dtype=torch.int32, device=self._tensor.device)
        return self._counts

    def tensor(self) -> Tensor:
        """int32 [R, WIDTH]; sends the changes since the last call."""
        if self._entered:
            rows = np.fromiter(self._entered, dtype=np.int64)
            values = np.stack(list(self._entered.values()))
            self._entered.clear()
            device = self._tensor.device
            self._tensor.index_copy_(0, to_device(rows, device), to_device(values, device))
        return self._tensor
