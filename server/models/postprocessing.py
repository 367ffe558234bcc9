"""The postprocessing model: ids of each beam to text."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.server.inference.request import InferRequest, InferResponse, Tensor
from trimaran.server.inference.tensor_bytes import NUMPY_TYPES, from_config, object_array
from trimaran.server.models.encoded_texts import EncodedTexts
from trimaran.server.models.tokenizer import INLINE_IDS, IncrementalDetokenizer, Tokenizer
from trimaran.server.repository.model_repository import RepositoryModel
from trimaran.server.repository.signatures import PASSED_ON

_FILLED = frozenset(
    f"OUT_{name}"
    for name in ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS")
)
_MAX_IDS = 1 << 22
"""Most ids of the texts of one request: 32 beams of 131,072."""

_MANY_IDS = 1 << 18
"""Tables of more ids, padding among them, are looked through in a thread."""


@dataclass(slots=True, kw_only=True)
class LastIdsJob(InferRequest):
    """The end of a stream of ids: the detokenizer's text of the last ids.

    Sent as an ordinary request, so that a text request counts here once.
    """

    detokenizer: IncrementalDetokenizer
    ids: list[int] = field(default_factory=list)


class PostprocessingModel:
    """A model of the postprocessing role; always native, even with a ``model.py``."""

    is_decoupled = False
    is_ready = True

    def __init__(self, model: RepositoryModel, version: int, tokenizer: Tokenizer) -> None:
        self.name = model.name
        self.version = str(version)
        self.config = model.config
        self.tokenizer = tokenizer
        skip = model.parameters.get_loose_bool("skip_special_tokens")
        self.skip_special_tokens = True if skip is None else skip
        self._outputs = {tensor.name for tensor in model.config.output}
        self._filled = {
            tensor.name: (from_config(tensor.data_type), len(tensor.dims) + 1)
            for tensor in model.config.output
            if tensor.name in _FILLED
        }
        """Datatype and rank of the outputs that every response has."""

    async def infer(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Decode every beam of every sample; see `inference.Model`."""
        yield await self.respond(request)

    async def respond(self, request: InferRequest) -> InferResponse:
        """Decode every beam of every sample; see `inference.OneResponseModel`."""
        if isinstance(request, LastIdsJob):
            push = partial(request.detokenizer.push, request.ids, is_last=True)
            is_long = len(request.ids) > INLINE_IDS
            texts = [await self.tokenizer.in_thread(push) if is_long else push()]
        else:
            is_large = request.inputs["TOKENS_BATCH"].data.size > _MANY_IDS
            beams = await asyncio.to_thread(_beams, request) if is_large else _beams(request)
            texts = await self.tokenizer.decode_each(beams, self.skip_special_tokens)
        # As the script of Triton's TensorRT-LLM backend answers: [samples x beams], although
        # the configuration declares a batch dimension.
        data = object_array([text.encode() for text in texts])
        outputs = [Tensor("OUTPUT", "BYTES", data), *self._passed_on(request)]
        return InferResponse(
            model_name=self.name,
            model_version=self.version,
            id=request.id,
            outputs=[o for o in outputs if not request.outputs or o.name in request.outputs],
            is_final=True,
        )

    def _passed_on(self, request: InferRequest) -> list[Tensor]:
        """Tensors that older configurations pass through this step; zeros of those that the
        request lacks.
        """
        given = [
            Tensor(f"OUT_{name}", tensor.datatype, tensor.data)
            for name, tensor in request.inputs.items()
            if name in PASSED_ON and f"OUT_{name}" in self._outputs
        ]
        names = {tensor.name for tensor in given}
        return given + [
            Tensor(name, datatype, np.zeros((1,) * rank, NUMPY_TYPES[datatype]))
            for name, (datatype, rank) in self._filled.items()
            if name not in names
        ]


def _beams(request: InferRequest) -> EncodedTexts:
    """The ids of each beam of each sample.

    Raises:
        RequestError: lengths and beams do not fit together, or ids are none or too many.
    """
    tokens = request.inputs["TOKENS_BATCH"].data
    beams = tokens.reshape(math.prod(tokens.shape[:-1]), tokens.shape[-1])
    if "SEQUENCE_LENGTH" in request.inputs:
        lengths = request.inputs["SEQUENCE_LENGTH"].data.reshape(-1)
    else:
        # Models of version 0.5 have no lengths: a text ends where the padding begins.
        lengths = np.cumprod(beams >= 0, axis=1, dtype=np.int64).sum(axis=1)
    if len(lengths) != len(beams):
        raise RequestError(
            f"SEQUENCE_LENGTH has {len(lengths)} lengths, but TOKENS_BATCH has "
            f"{len(beams)} beams; give one length a beam"
        )
    lengths = lengths.clip(0, beams.shape[1]).astype(np.int64)
    if lengths.sum() > _MAX_IDS:
        raise RequestError(
            f"TOKENS_BATCH holds {lengths.sum()} ids that are text, but a request may bring at "
            f"most {_MAX_IDS}; send several requests"
        )
    ids = beams[np.arange(beams.shape[1]) < lengths[:, np.newaxis]].astype(np.int32)
    if len(ids) and ids.min() < 0:
        beam = int(np.searchsorted(np.cumsum(lengths), np.flatnonzero(ids < 0)[0], "right"))
        raise RequestError(
            f"TOKENS_BATCH holds {ids.min()} within the first {lengths[beam]} ids, which "
            "SEQUENCE_LENGTH says are text"
        )
    return EncodedTexts(ids, lengths)
