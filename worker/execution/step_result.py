"""The result of one step, and its message between pipeline stages."""

from __future__ import annotations

from typing import Any, Protocol

import msgpack
import numpy as np
import torch
from torch import Tensor

from trimaran.comm.control.result_link import ResultReader
from trimaran.comm.errors import ProtocolError
from trimaran.worker.sampling.outputs import SamplerOutput
from trimaran.worker.steps.step_times import StepMarks
from trimaran.worker.steps.step_types import KeptLogits, SampledTokens

_Wire = list[Any]


def encode_sampled(step: int, sampled: SampledTokens) -> bytes:
    """The message of a step's result. The result must be on the host."""
    log_probs, logits = sampled.log_probs, sampled.logits
    packed: bytes = msgpack.packb(
        [
            step,
            np.array(sampled.token_ids, dtype=np.int32).tobytes(),
            None if log_probs is None else np.array(log_probs, dtype=np.float32).tobytes(),
            [
                [np.array(ids, np.int32).tobytes(), np.array(values, np.float32).tobytes()]
                for ids, values in sampled.beams
            ],
            None if logits is None else _logits_to_wire(logits),
            sampled.proposals,
        ]
    )
    return packed


def decode_sampled(payload: bytes, step: int) -> SampledTokens:
    """The result of ``step``.

    Raises:
        ProtocolError: ``payload`` is no valid result, or the result of another step.
    """
    try:
        told, ids, log_probs, beams, logits, proposals = msgpack.unpackb(
            payload, strict_map_key=False
        )
        found = SampledTokens(
            token_ids=np.frombuffer(ids, np.int32).tolist(),
            log_probs=None if log_probs is None else np.frombuffer(log_probs, "<f4").tolist(),
            logits=None if logits is None else _logits_from_wire(logits),
            beams=[
                (np.frombuffer(ids, np.int32).tolist(), np.frombuffer(values, "<f4").tolist())
                for ids, values in beams
            ],
            proposals=proposals,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"cannot decode a step's result of {len(payload)} bytes: {error}"
        ) from error
    if told != step:
        raise ProtocolError(f"got the result of step {told} where that of {step} was due")
    return found


def _logits_to_wire(logits: KeptLogits) -> _Wire:
    context = {
        index: [_to_wire(piece) for piece in pieces] for index, pieces in logits.context.items()
    }
    generation = {index: _to_wire(each) for index, each in logits.generation.items()}
    return [context, generation]


def _logits_from_wire(wire: _Wire) -> KeptLogits:
    context, generation = wire
    return KeptLogits(
        {index: [_from_wire(piece) for piece in pieces] for index, pieces in context.items()},
        {index: _from_wire(each) for index, each in generation.items()},
    )


def _to_wire(tensor: Tensor) -> _Wire:
    name = str(tensor.dtype).removeprefix("torch.")
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return [name, list(tensor.shape), raw]


def _from_wire(wire: _Wire) -> Tensor:
    name, shape, raw = wire
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, name)).view(shape)


class ModelRunnerOutput(Protocol):
    """One step's result, possibly still on the device."""

    marks: StepMarks
    """The marks of this rank's part of the step."""

    def wait(self) -> SampledTokens:
        """The sampled ids on the host. Call once; waits until they are there."""
        ...


class RemoteOutput:
    """A step's result that the last stage sends to rank 0; other ranks get no ids."""

    __slots__ = ("_reader", "_step", "marks")

    def __init__(self, reader: ResultReader | None, step: int, marks: StepMarks) -> None:
        self._reader = reader
        self._step = step
        self.marks = marks

    def wait(self) -> SampledTokens:
        """The sampled ids. Call in order of steps.

        Raises:
            PeerLostError: the last stage missed its deadline.
        """
        if self._reader is None:
            return SampledTokens(token_ids=[])
        return decode_sampled(self._reader.read(), self._step)


class LocalOutput:
    """A step's result on this rank's device."""

    __slots__ = (
        "_beams", "_event", "_log_probs", "_logits", "_proposals", "_token_ids", "marks",
    )  # fmt: skip

    def __init__(
        self,
        output: SamplerOutput,
        ids_for_host: Tensor,
        copier: Copier | None,
        marks: StepMarks,
        logits: KeptLogits | None = None,
        proposals: Tensor | None = None,
    ) -> None:
        """``ids_for_host``, and the copy to the host of a network's ``proposals`` [n, k], were
        launched before the end of the step was marked."""
        self.marks = marks
        self._logits = logits
        self._token_ids = ids_for_host
        self._log_probs = output.log_probs
        self._beams = None if output.beams is None else output.beams.to_host()
        self._proposals = proposals
        self._event: torch.cuda.Event | None = None
        if copier is not None:
            self._token_ids, self._log_probs, self._event = copier.start(
                ids_for_host, output.log_probs, marks
            )

    def wait(self) -> SampledTokens:
        """The sampled ids on the host. Waits until the device has copied them."""
        if self._event is not None:
            self._event.synchronize()
        return SampledTokens(
            token_ids=self._token_ids.tolist(),
            log_probs=None if self._log_probs is None else self._log_probs.tolist(),
            logits=self._logits,
            beams=[] if self._beams is None else self._beams.to_lists(),
            proposals=[] if self._proposals is None else self._proposals.tolist(),
        )


class Copier:
    """Copies results to pinned memory on its own stream, for which later steps do not wait.

    The memory is a ring: read a result before ``depth`` more copies are started.
    """

    def __init__(self, device: torch.device, max_ids: int, depth: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [
            (
                torch.empty(max_ids, dtype=torch.int64, pin_memory=True),
                torch.empty(max_ids, dtype=torch.float32, pin_memory=True),
                torch.cuda.Event(blocking=True),  # type: ignore[no-untyped-call]
            )
            for _ in range(depth + 1)
        ]
        self._turn = 0

    def start(
        self, ids_for_host: Tensor, log_probs: Tensor | None, marks: StepMarks
    ) -> tuple[Tensor, Tensor | None, torch.cuda.Event]:
        """Launch the copies after the step's end; the event marks their completion."""
        self._turn = (self._turn + 1) % len(self._slots)
        ids_memory, log_probs_memory, event = self._slots[self._turn]
        marks.hold(self._stream)
        with torch.cuda.stream(self._stream):
            copied_ids = _copy_back(ids_for_host, ids_memory, self._stream)
            copied = None
            if log_probs is not None:
                copied = _copy_back(log_probs, log_probs_memory, self._stream)
            event.record(self._stream)
        return copied_ids, copied, event


def _copy_back(source: Tensor, memory: Tensor, stream: torch.cuda.Stream) -> Tensor:
    # Do not let torch reuse the sampler's memory before the copy has read it.
    source.record_stream(stream)
    # In the source's dtype: a conversion would launch another kernel.
    return memory.view(source.dtype)[: len(source)].copy_(source, non_blocking=True)
