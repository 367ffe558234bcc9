"""The outputs of a sequence beside its ids or text: indices, lengths, log-probs, logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.messages.messages import FinishReason
from trimaran.server.engines.live_request import Beams, TokenChunk, logits_by_beam, padded
from trimaran.server.inference.request import Tensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, from_config, object_array
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sampling_inputs import PERF_METRICS
from trimaran.server.repository.signatures import precedes_sequences

LOGITS_DTYPES = {"FP32": "float32", "FP16": "float16"}
"""The datatypes of logits outputs, and how an engine calls them."""

STOPPED = "stop"
"""The finish reason of an end id or a stop word."""

_LOG_PROBS = ("cum_log_probs", "output_log_probs")
_LOGITS = ("context_logits", "generation_logits")
_ASKING = frozenset((
    "return_num_input_tokens", "return_num_output_tokens", "return_log_probs",
    "return_finish_reason", *PERF_METRICS, *(f"return_{name}" for name in _LOGITS),
))  # fmt: skip
"""The inputs that ask for further outputs."""

_FIGURES = (
    ("kv_cache_alloc_new_blocks", "INT32"),
    ("kv_cache_reused_blocks", "INT32"),
    ("kv_cache_alloc_total_blocks", "INT32"),
    ("arrival_time_ns", "INT64"),
    ("first_scheduled_time_ns", "INT64"),
    ("first_token_time_ns", "INT64"),
    ("last_token_time_ns", "INT64"),
    ("acceptance_rate", "FP32"),
    ("total_accepted_draft_tokens", "INT32"),
    ("total_draft_tokens", "INT32"),
)


REASONS = {
    FinishReason.END_ID: STOPPED,
    FinishReason.STOP_WORDS: STOPPED,
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
}
"""How responses name the end of a sequence."""


@dataclass(slots=True)
class Progress:
    """The state of one sequence."""

    num_input: int
    num_output: int = 0
    cum_log_prob: float = 0.0
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities of all ids so far, if asked for."""

    num_taken: int = 0
    """How many of them `take_log_probs` has returned."""

    logits: dict[str, list[bytes | memoryview]] = field(default_factory=dict)
    """By output name, the logits that no response has carried yet."""

    logits_dtype: str = ""
    figures: dict[str, int] = field(default_factory=dict)
    beams: Beams | None = None
    """Add the next ids."""

    finish_reason: str = ""
    """Empty until the sequence ends."""

    def add(self, chunk: TokenChunk) -> None:
        """Take in the next ids."""
        self.num_output += len(chunk.token_ids)
        if chunk.is_last:
            self.finish_reason = REASONS[chunk.finish_reason]
        if not chunk.extras:
            return
        if "beams" in chunk.extras:
            self.beams = Beams.from_wire(chunk.extras["beams"])
            self.num_output = self.beams.num_tokens
        # Summed here: after a replay an engine reports only the tokens that it sampled.
        new = chunk.extras.get("log_probs", ())
        self.cum_log_prob += sum(new)
        self.log_probs += new
        self.figures = chunk.extras.get("figures", self.figures)
        self.logits_dtype = chunk.extras.get("logits_dtype", self.logits_dtype)
        for name in _LOGITS:
            if name in chunk.extras:
                self.logits.setdefault(name, []).extend(chunk.extras[name])
        if self.beams is not None and "generation_logits" in self.logits:
            # Logits of earlier steps belong to beams that were replaced.
            num_logits = sum(self.beams.num_logits)
            del self.logits["generation_logits"][: -num_logits or None]

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reason of each beam, or of the only sequence."""
        if self.beams is None:
            return [self.finish_reason]
        # Unfinished beams end for the reason of their request.
        return [REASONS.get(reason, self.finish_reason) for reason in self.beams.reasons]

    def take_log_probs(self) -> list[float]:
        """The log-probabilities since the last call."""
        taken = self.log_probs[self.num_taken :]
        self.num_taken = len(self.log_probs)
        return taken

    def take_logits(self, name: str, *, keeps: bool = False) -> npt.NDArray[Any] | None:
        """The logits [tokens, vocabulary] since the last call; None if there are none. With
        ``keeps`` the next call has them too.
        """
        pieces = self.logits.pop(name, None)
        if not pieces:
            return None
        # Context logits come in chunks of any length, generation logits token by token.
        num_tokens = self.num_input if name == "context_logits" else len(pieces)
        raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if keeps:
            self.logits[name] = [raw]
        return np.frombuffer(raw, self.logits_dtype).reshape(num_tokens, -1)


class SequenceOutputs:
    """Selects the outputs that a request asks for by ``flags``, the token model's inputs."""

    def __init__(
        self,
        flags: SampleInputs,
        num_samples: int,
        num_sequences: int,
        config: ModelConfig,
        *,
        normalises_log_probs: bool = True,
    ) -> None:
        """``config`` is the configuration of the answering model.

        With ``normalises_log_probs``, the ``cum_log_probs`` of beams are their scores,
        otherwise plain sums.
        """
        self._normalises = normalises_log_probs
        self._config = config
        self._is_streaming = flags.flag("streaming")
        declared = {output.name for output in config.output}
        is_older = precedes_sequences(config)
        self._has_batch_index = num_samples > 1 or (is_older and "batch_index" in declared)
        self._has_sequence_index = num_sequences > 1
        asks = flags.has_any(_ASKING)
        self._has_num_input = asks and flags.flag("return_num_input_tokens")
        self._has_num_output = asks and flags.flag("return_num_output_tokens")
        self._has_log_probs = asks and flags.flag("return_log_probs")
        self._has_reason = asks and flags.flag("return_finish_reason")
        self._has_figures = asks and flags.flag(*PERF_METRICS)
        self._logits = [name for name in _LOGITS if asks and flags.flag(f"return_{name}")]
        asked = {*(_LOG_PROBS if self._has_log_probs else ()), *self._logits}
        absent = [name for name in (*_LOG_PROBS, *_LOGITS) if name in declared - asked]
        self._filled = absent if is_older else []
        """Outputs that the request did not ask for, and that older models fill with zeros."""
        self._has_any = (
            bool(self._filled)
            or self._has_batch_index
            or self._has_sequence_index
            or self._has_num_input
            or self._has_num_output
            or self._has_log_probs
            or self._has_figures
            or self._has_reason
            or bool(self._logits)
        )

    @property
    def has_any(self) -> bool:
        """Whether responses carry outputs beside ids or text."""
        return self._has_any

    @property
    def tell_of_ends(self) -> bool:
        """Whether the last response carries outputs that earlier responses lack."""
        return self._has_reason or self._has_figures

    def tensors(
        self, sample: int, sequence: int, progress: Progress, *, is_last: bool
    ) -> list[Tensor]:
        """The outputs of a response, with a batch dimension of 1; its end with the last."""
        if not self._has_any:
            return []
        chosen = (
            ("batch_index", sample, self._has_batch_index),
            ("sequence_index", sequence, self._has_sequence_index),
            ("num_input_tokens", progress.num_input, self._has_num_input),
            ("num_output_tokens", progress.num_output, self._has_num_output),
        )
        tensors = [
            _scalar(name, "INT32", value) for name, value, is_wanted in chosen if is_wanted
        ]
        if self._has_log_probs:
            tensors += self._log_probs_tensors(progress)
        tensors += self._logits_tensors(progress)
        tensors += [_zero(name, self._config, progress.num_input) for name in self._filled]
        if self._has_reason and is_last:
            reasons = progress.finish_reasons
            data = object_array([reason.encode() for reason in reasons], (1, len(reasons)))
            tensors.append(Tensor("finish_reason", "BYTES", data))
        if self._has_figures:
            figures = {**progress.figures, "acceptance_rate": acceptance(progress.figures)}
            tensors += [
                _scalar(name, datatype, figures.get(name, 0)) for name, datatype in _FIGURES
            ]
        return tensors

    def _log_probs_tensors(self, progress: Progress) -> list[Tensor]:
        # Each response of a stream has those of all ids, beside the new ids alone.
        total, each = [progress.cum_log_prob], [progress.log_probs]
        beams = progress.beams
        if beams is not None:
            total = beams.scores if self._normalises else beams.cum_log_probs
            each = beams.log_probs
        return [
            Tensor("cum_log_probs", "FP32", np.array([total], dtype=np.float32)),
            Tensor("output_log_probs", "FP32", padded(each, np.float32)),
        ]

    def _logits_tensors(self, progress: Progress) -> Iterator[Tensor]:
        datatype = logits_type(self._config) if self._logits else ""
        for name in self._logits:
            # Each response of a stream has the prompt's logits.
            keeps = name == "context_logits" and self._is_streaming
            logits = progress.take_logits(name, keeps=keeps)
            if logits is None:
                continue
            data = logits.astype(NUMPY_TYPES[datatype], copy=False)[np.newaxis]
            if name == "generation_logits":
                if progress.beams is not None:
                    data = logits_by_beam(progress.beams.num_logits, data[0])
                # [1, beams, tokens, V]; in a stream tokens stand before beams.
                data = (
                    data.swapaxes(0, 1)[np.newaxis] if self._is_streaming else data[np.newaxis]
                )
            yield Tensor(name, datatype, data)


def acceptance(figures: Mapping[str, int]) -> float:
    """The accepted part of the draft tokens; 0 without drafts."""
    num_drafted = figures.get("total_draft_tokens", 0)
    return figures.get("total_accepted_draft_tokens", 0) / num_drafted if num_drafted else 0.0


def _zero(name: str, config: ModelConfig, num_input: int) -> Tensor:
    if name in _LOGITS:
        datatype = logits_type(config)
        rank = 3 if name == "context_logits" else 4
        return Tensor(name, datatype, np.zeros((1,) * rank, NUMPY_TYPES[datatype]))
    shape = (1, 1) if name == "cum_log_probs" else (1, 1, num_input)
    return Tensor(name, "FP32", np.zeros(shape, np.float32))


def logits_type(config: ModelConfig) -> str:
    """The datatype of a model's logits outputs, FP32 where it has none."""
    types = (from_config(o.data_type) for o in config.output if o.name.endswith("_logits"))
    return next(types, "FP32")


def _scalar(name: str, datatype: str, value: float) -> Tensor:
    return Tensor(name, datatype, np.array([[value]], dtype=NUMPY_TYPES[datatype]))
