"""What a step sampled, as one message from the last pipeline stage to rank 0."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from trimaran.comm.errors import ProtocolError
from trimaran.worker.steps.step_types import KeptLogits, SampledTokens

_Wire = list[Any]


def encode_sampled(step: int, sampled: SampledTokens) -> bytes:
    """The message of a step's result, which is on the host."""
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
        ]
    )
    return packed


def decode_sampled(payload: bytes, step: int) -> SampledTokens:
    """The result of ``step``.

    Raises:
        ProtocolError: ``payload`` is not an encoded result, or that of another step.
    """
    try:
        told, ids, log_probs, beams, logits = msgpack.unpackb(payload, strict_map_key=False)
        found = SampledTokens(
            token_ids=np.frombuffer(ids, np.int32).tolist(),
            log_probs=None if log_probs is None else np.frombuffer(log_probs, "<f4").tolist(),
            logits=None if logits is None else _logits_from_wire(logits),
            beams=[
                (np.frombuffer(ids, np.int32).tolist(), np.frombuffer(values, "<f4").tolist())
                for ids, values in beams
            ],
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
