"""Converts the chunks of a token-level request to responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.messages import FinishReason
from trimaran.server.engines.live_request import TokenChunk, padded
from trimaran.server.inference.request import InferRequest, InferResponse, Model, Tensor
from trimaran.server.models.sample_inputs import SampleInputs
from trimaran.server.models.sequence_outputs import Progress, SequenceOutputs
from trimaran.server.models.token_job import ChunkResponse, Sample, TokenJob, TokenStream

_REQUIRED_OUTPUTS = ("output_ids", "sequence_length")


class Answers(Protocol):
    """Makes the responses of one request."""

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """The response for this chunk, or None."""
        ...


class ChunkAnswers:
    """Answers a text model in this process with each chunk unchanged."""

    def __init__(self, model: Model, request: TokenJob, stream: TokenStream) -> None:
        self._model = model
        self._request = request
        self._stream = stream
        self._ends: dict[tuple[int, int], Callable[[], None]] = {}

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """See `Answers`."""
        end = self._ends.get((sample, sequence))
        if end is None:
            end = partial(self._stream.cancel_sequence, sample, sequence)
            self._ends[sample, sequence] = end
        return ChunkResponse(
            model_name=self._model.name,
            model_version=self._model.version,
            id=self._request.id,
            is_final=is_end,
            sample=sample,
            sequence=sequence,
            chunk=chunk,
            end_sequence=end,
        )


class TensorAnswers:
    """Answers a client with tensors: per chunk if streaming, else per finished sequence."""

    def __init__(
        self,
        model: Model,
        request: InferRequest,
        samples: list[Sample],
        num_sequences: int,
        *,
        excludes_input: bool,
        normalises_log_probs: bool = True,
    ) -> None:
        """Prepare. ``excludes_input`` is the default for samples without the input.

        Raises:
            RequestError: outputs are named, but not the two that every response has.
        """
        declared = {output.name for output in model.config.output}
        required = [name for name in _REQUIRED_OUTPUTS if name in declared]
        for name in required:
            if request.outputs and name not in request.outputs:
                raise RequestError(
                    f"{name} tensor must be present in the list of output tensors"
                )
        self._has_lengths = "sequence_length" in declared
        self._model = model
        self._request = request
        self._samples = samples
        self._is_batched = model.config.max_batch_size > 0
        inputs = [
            SampleInputs(request.inputs, index, self._is_batched)
            for index in range(len(samples))
        ]
        self.is_streaming = inputs[0].flag("streaming")
        self._outputs = [
            SequenceOutputs(
                flags,
                len(samples),
                num_sequences,
                model.config,
                normalises_log_probs=normalises_log_probs,
            )
            for flags in inputs
        ]
        asked = [flags.scalar("exclude_input_in_output") for flags in inputs]
        self._excludes_input = [excludes_input if one is None else bool(one) for one in asked]
        self._ids: dict[tuple[int, int], list[int]] = {}
        self._progress: dict[tuple[int, int], Progress] = {}

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """See `Answers`."""
        place, prompt = (sample, sequence), self._samples[sample].prompt_ids
        others = self._outputs[sample]
        progress = self._progress.setdefault(place, Progress(len(prompt)))
        progress.add(chunk)
        ids = chunk.token_ids
        if self.is_streaming:
            # A stopped stream ends with the final flag alone, unless outputs remain.
            has_news = bool(ids) or "beams" in chunk.extras or others.tell_of_ends
            if not has_news and chunk.finish_reason is FinishReason.CANCELLED:
                return None
        else:
            so_far = self._ids.setdefault(place, [])
            so_far += ids
            if not chunk.is_last:
                return None
            ids = so_far if self._excludes_input[sample] else prompt + so_far
        rows = [ids]
        if progress.beams is not None:
            # Beams may change, so each streamed response carries them whole.
            has_prompt = not self.is_streaming and not self._excludes_input[sample]
            rows = [(prompt if has_prompt else []) + beam for beam in progress.beams.token_ids]
        lengths = [[len(row) for row in rows]]
        outputs = [Tensor("output_ids", "INT32", padded(rows, np.int32))]
        if self._has_lengths:
            outputs.append(
                Tensor("sequence_length", "INT32", np.array(lengths, dtype=np.int32))
            )
        outputs += others.tensors(sample, sequence, progress, is_last=chunk.is_last)
        return self._response(outputs, is_end)

    def _response(self, outputs: list[Tensor], is_final: bool) -> InferResponse:
        wanted = self._request.outputs
        if not self._is_batched:
            for tensor in outputs:
                tensor.data = tensor.data[0]
        return InferResponse(
            model_name=self._model.name,
            model_version=self._model.version,
            id=self._request.id,
            outputs=[o for o in outputs if not wanted or o.name in wanted],
            is_final=is_final,
        )
