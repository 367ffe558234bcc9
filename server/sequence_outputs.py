"""What a response says of a sequence beside its ids or text: place, lengths, log-probs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trimaran.server.inference import Tensor
from trimaran.server.live_request import TokenChunk
from trimaran.server.sample_inputs import SampleInputs


@dataclass(slots=True)
class Progress:
    """One sequence so far."""

    num_input: int
    num_output: int = 0
    cum_log_prob: float = 0.0
    log_probs: list[float] = field(default_factory=list)
    """Of the ids since `take_log_probs`."""

    def add(self, chunk: TokenChunk) -> None:
        """Take in the next ids."""
        self.num_output += len(chunk.token_ids)
        # Summed here, as an engine knows only what it sampled itself.
        new = chunk.extras.get("log_probs", ())
        self.cum_log_prob += sum(new)
        self.log_probs += new

    def take_log_probs(self) -> list[float]:
        """The log-probabilities since the last call."""
        taken, self.log_probs = self.log_probs, []
        return taken


class SequenceOutputs:
    """Which of these outputs one request gets. ``flags`` are the token model's inputs."""

    def __init__(self, flags: SampleInputs, num_samples: int, num_sequences: int) -> None:
        self._has_batch_index = num_samples > 1
        self._has_sequence_index = num_sequences > 1
        self._has_num_input = flags.flag("return_num_input_tokens")
        self._has_num_output = flags.flag("return_num_output_tokens")
        self._has_log_probs = flags.flag("return_log_probs")
        self._has_any = (
            self._has_batch_index
            or self._has_sequence_index
            or self._has_num_input
            or self._has_num_output
            or self._has_log_probs
        )

    def tensors(self, sample: int, sequence: int, progress: Progress) -> list[Tensor]:
        """The outputs of a response, with a batch dimension of 1."""
        if not self._has_any:
            return []
        chosen = (
            ("batch_index", sample, self._has_batch_index),
            ("sequence_index", sequence, self._has_sequence_index),
            ("num_input_tokens", progress.num_input, self._has_num_input),
            ("num_output_tokens", progress.num_output, self._has_num_output),
        )
        tensors = [
            Tensor(name, "INT32", np.array([[value]], dtype=np.int32))
            for name, value, is_wanted in chosen
            if is_wanted
        ]
        if self._has_log_probs:
            total, each = [[progress.cum_log_prob]], [[progress.take_log_probs()]]
            tensors += [
                Tensor("cum_log_probs", "FP32", np.array(total, dtype=np.float32)),
                Tensor("output_log_probs", "FP32", np.array(each, dtype=np.float32)),
            ]
        return tensors
