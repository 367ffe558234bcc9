"""Converts the chunks of a token-level request to responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from trimaran.server.repository.signatures import precedes_sequences

_REQUIRED_OUTPUTS = ("output_ids", "sequence_length")


class Answers(Protocol):
    """Makes the responses of one request."""

    def parts(self, chunk: TokenChunk) -> Iterable[TokenChunk]:
        """The parts of a chunk to `take` one after the other."""
        ...

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """The response for this chunk, or None."""
        ...


class _WholeChunks:
    """Answers that take each chunk as it comes."""

    def parts(self, chunk: TokenChunk) -> Iterable[TokenChunk]:
        """See `Answers`."""
        return (chunk,)


class ChunkAnswers(_WholeChunks):
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
        # Clients of older versions read one id a response.
        self._is_singly = self.is_streaming and precedes_sequences(model.config)
        self._ids: dict[tuple[int, int], list[int]] = {}
        self._progress: dict[tuple[int, int], Progress] = {}

    def parts(self, chunk: TokenChunk) -> Iterable[TokenChunk]:
        """See `Answers`."""
        return chunk.singly() if self._is_singly else (chunk,)

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """See `Answers`."""
        key, prompt = (sample, sequence), self._samples[sample].prompt_ids
        others = self._outputs[sample]
        progress = self._progress.setdefault(key, Progress(len(prompt)))
        progress.add(chunk)
        ids = chunk.token_ids
        if self.is_streaming:
            # A stopped stream ends with the final flag alone, unless outputs remain.
            has_output = bool(ids) or "beams" in chunk.extras or others.tell_of_ends
            if not has_output and chunk.finish_reason is FinishReason.CANCELLED:
                return None
        else:
            so_far = self._ids.setdefault(key, [])
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


class BatchAnswers(_WholeChunks):
    """Answers a client of a model without in-flight batching: one response for all samples.

    Shapes, with B samples, W beams, P ids of the longest prompt and N new ids at most:
    ``output_ids`` [B, W, P + N] holds prompts and new ids, filled up with the end id;
    ``log_probs`` [B, N, W] and ``cum_log_probs`` [B, W] are filled up with 0.
    """

    is_streaming = False

    def __init__(
        self,
        model: Model,
        request: InferRequest,
        samples: list[Sample],
        *,
        excludes_input: bool,
        max_seq_len: int,
    ) -> None:
        self._model = model
        self._request = request
        self._sampling = samples[0].sampling
        declared = {output.name for output in model.config.output}
        self._wanted = request.outputs or declared
        self._samples = samples
        self._excludes_input = excludes_input
        # A client may ask for more ids than a sequence has positions.
        self._max_new = max(
            min(sample.sampling.max_tokens, max_seq_len - len(sample.prompt_ids))
            for sample in samples
        )
        num_beams = self._sampling.beam_width
        num_shown = 0 if excludes_input else max(len(s.prompt_ids) for s in samples)
        shape = (len(samples), num_beams, num_shown + self._max_new)
        self._output_ids = np.empty(shape, np.int32)
        self._log_probs = np.zeros((len(samples), self._max_new, num_beams), np.float32)
        self._cum_log_probs = np.zeros((len(samples), num_beams), np.float32)
        self._ids: list[list[int]] = [[] for _ in samples]
        self._progress = [Progress(len(sample.prompt_ids)) for sample in samples]

    def take(
        self, sample: int, sequence: int, chunk: TokenChunk, is_end: bool
    ) -> InferResponse | None:
        """See `Answers`."""
        progress, ids = self._progress[sample], self._ids[sample]
        progress.add(chunk)
        ids += chunk.token_ids
        if chunk.is_last:
            self._fill(sample, progress, ids)
        if not is_end:
            return None
        outputs = [Tensor("output_ids", "INT32", self._output_ids)]
        if self._sampling.return_log_probs:
            outputs.append(Tensor("log_probs", "FP32", self._log_probs))
            outputs.append(Tensor("cum_log_probs", "FP32", self._cum_log_probs))
        return InferResponse(
            model_name=self._model.name,
            model_version=self._model.version,
            id=self._request.id,
            outputs=[tensor for tensor in outputs if tensor.name in self._wanted],
            is_final=True,
        )

    def _fill(self, sample: int, progress: Progress, ids: list[int]) -> None:
        """Write the rows of a finished sample, as long as others run."""
        beams = progress.beams
        rows = [ids] if beams is None else beams.token_ids
        each = [progress.take_log_probs()] if beams is None else beams.log_probs
        totals = [progress.cum_log_prob] if beams is None else beams.cum_log_probs
        prompt = [] if self._excludes_input else self._samples[sample].prompt_ids
        block = self._output_ids[sample]
        block[:] = self._samples[sample].sampling.end_id
        block[:, : len(prompt)] = prompt
        for beam, row in enumerate(rows):
            block[beam, len(prompt) : len(prompt) + len(row)] = row
        if self._sampling.return_log_probs:
            self._cum_log_probs[sample, : len(totals)] = totals
            for beam, values in enumerate(each):
                self._log_probs[sample, : len(values), beam] = values
