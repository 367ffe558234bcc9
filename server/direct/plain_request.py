"""The plain text requests of one model: which requests are plain, and what they ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.comm.errors import RequestError
from trimaran.comm.messages.sampling_fields import FIELDS
from trimaran.comm.messages.token_ids import pack_ids
from trimaran.server.inference.request import InferRequest
from trimaran.server.models.preprocessing import PreprocessingModel
from trimaran.server.models.sample_inputs import PlainInputs, SampleInputs
from trimaran.server.models.sampling_inputs import PERF_METRICS, check_request_type, read_fields
from trimaran.server.models.sequence_outputs import SequenceOutputs
from trimaran.server.models.text_models import BlsModel
from trimaran.server.models.text_pipeline import TextPipeline
from trimaran.server.models.text_request import TextRequest
from trimaran.server.models.text_run import TOKEN_FROM_PREPROCESSING
from trimaran.server.models.token_inputs import MAX_DRAFT_TOKENS, salted
from trimaran.server.models.token_job import OneSequence
from trimaran.server.models.token_model import TokenModel
from trimaran.server.models.tokenizer import INLINE_IDS

_WORDS = frozenset(("STOP_WORDS_DICT", "BAD_WORDS_DICT"))
"""Inputs of preprocessing that may be there with an empty text."""

_SCALARS = frozenset(
    name
    for row in FIELDS.values()
    if row.type_name in ("int", "float", "bool")
    for name in row.inputs
)
_STREAMING = "streaming"
_OFF = frozenset((
    _STREAMING, "stop", "return_log_probs", "return_context_logits",
    "return_generation_logits",
))  # fmt: skip
"""Inputs of the token model that ask for another form of the answer."""

_FURTHER_OUTPUTS = frozenset((
    "return_num_input_tokens", "return_num_output_tokens", "return_finish_reason",
    *PERF_METRICS,
))  # fmt: skip
_MAX_TEXT_BYTES = 16 << 10
"""A longer text has more characters than a plain prompt."""

_EXCLUDES_INPUT = "exclude_input_in_output"
_ONE = ("beam_width", "num_return_sequences")
_KNOWN = _SCALARS | _OFF | _FURTHER_OUTPUTS | {_EXCLUDES_INPUT, *_ONE}
_NEEDED_WIRES = ("input_ids", "input_lengths", "request_output_len")


@dataclass(slots=True)
class PlainRequest:
    """A request that is known to be right."""

    request: InferRequest
    one: OneSequence
    prompt: str
    prompt_ids: list[int]
    tokenized_ns: int = 0
    """Time that preprocessing took."""

    skip_special_tokens: bool = True
    excludes_input: bool = True


@dataclass(slots=True)
class _Source:
    """The inputs of the steps that one input of the text model is for."""

    preprocessing: tuple[str, ...] = ()
    token: tuple[str, ...] = ()


@dataclass(slots=True)
class _Read:
    """The values of a request by their receiver."""

    prompt: str
    preprocessing: dict[str, Any] = field(default_factory=dict)
    token: dict[str, Any] = field(default_factory=dict)
    is_streaming: bool = False


class PlainReader:
    """Reads the plain requests of one model. Stateless; never raises for a client's fault."""

    def __init__(self, pipeline: TextPipeline, model: object) -> None:
        """``model`` answers the requests with ``pipeline``."""
        self.pipeline = pipeline
        steps, maps = pipeline.steps, pipeline.maps
        self._steps = steps
        self._is_bls = isinstance(model, BlsModel)
        token, preprocessing = steps.token.plain, steps.preprocessing.plain
        self._token = token if isinstance(token, TokenModel) else None
        self._preprocessing = (
            preprocessing if isinstance(preprocessing, PreprocessingModel) else None
        )
        self.output = maps.outputs.get("OUTPUT", "")
        """The text model's output with the text."""

        wires = maps.token_from_preprocessing
        no_inputs = SampleInputs({}, 0, False)
        outputs = SequenceOutputs(no_inputs, 1, 1, pipeline.options.config)
        self._has_wires = all(
            wires.get(name) == TOKEN_FROM_PREPROCESSING[name] for name in _NEEDED_WIRES
        )
        self.takes_tensors = bool(self.output) and self._has_wires and not outputs.has_any
        """Whether requests in the form of the text model's inputs can be plain: their answers
        have no output but the text."""

        self._streams = (
            self.takes_tensors
            and steps.token.is_decoupled
            and bool(getattr(model, "is_decoupled", False))
            and not pipeline.options.accumulates
        )
        """Whether such requests can be plain streams."""

        self._end_wires = tuple(
            name
            for name in ("end_id", "pad_id")
            if wires.get(name) == TOKEN_FROM_PREPROCESSING[name]
        )
        self._sources, refused = _sources(maps.preprocessing, maps.token)
        declared = {tensor.name for tensor in pipeline.options.config.input}
        self._ignored = frozenset(
            () if self._is_bls else declared.difference(self._sources, refused)
        )
        """Declared inputs that are connected to nothing."""

    def of_values(
        self, request: InferRequest, values: Mapping[str, Any], *, is_streaming: bool = False
    ) -> PlainRequest | None:
        """The plain request of a text model's inputs, each with one value; None if the request
        is not plain, or is wrong. ``is_streaming`` says which requests are meant: those for a
        stream, or those for one answer.
        """
        if not self.takes_tensors or (self._is_bls and request.parameters):
            return None
        if is_streaming and not self._streams:
            return None
        read = self._read(values)
        if read is None or read.is_streaming != is_streaming:
            return None
        if not _FURTHER_OUTPUTS.isdisjoint(read.token):
            return None
        token = read.token
        given = read.preprocessing
        token["request_output_len"] = given.get("REQUEST_OUTPUT_LEN", 0)
        names_end = "END_ID" in given
        self._add_ends(token, given.get("END_ID"), given.get("PAD_ID"), self._end_wires)
        excluded = token.pop(_EXCLUDES_INPUT, None)
        found = self._checked(request, read.prompt, token, () if names_end else None)
        if found is not None:
            found.skip_special_tokens = self._steps.skip_special_tokens
            found.excludes_input = (
                self._steps.excludes_input if excluded is None else bool(excluded)
            )
        return found

    def of_tensors(
        self, request: InferRequest, *, is_streaming: bool = False
    ) -> PlainRequest | None:
        """`of_values`, of a request whose inputs fit the model's configuration."""
        if not self.takes_tensors or any(name != self.output for name in request.outputs):
            return None
        values: dict[str, Any] = {}
        for name, tensor in request.inputs.items():
            if tensor.data.size != 1:
                return None
            value = tensor.data.item()
            if isinstance(value, bytes):
                if len(value) > _MAX_TEXT_BYTES:
                    return None
                try:
                    value = value.decode()
                except UnicodeDecodeError:
                    return None
            values[name] = value
        return self.of_values(request, values, is_streaming=is_streaming)

    def of_text_request(self, request: TextRequest) -> PlainRequest | None:
        """The plain request of a text request; None as for `of_values`."""
        if (
            len(request.prompts) != 1
            or request.is_streaming
            or request.num_sequences != 1
            or request.stop_words
            or request.num_top
        ):
            return None
        token: dict[str, Any] = {}
        for name, value in request.sampling.items():
            if name not in _KNOWN or not isinstance(value, (bool, int, float)):
                return None
            if (name in _OFF and value) or (name in _ONE and value != 1):
                return None
            # As the tensor of the value holds it.
            token[name] = float(np.float32(value)) if isinstance(value, float) else value
        token["request_output_len"] = request.max_tokens
        self._add_ends(token, -1 if request.ignores_end else None, None, ("end_id", "pad_id"))
        ids = None
        if request.prompt_ids is not None:
            if len(request.prompt_ids[0]) > INLINE_IDS:
                return None
            ids = request.prompt_ids[0].tolist()
        found = self._checked(
            request, request.prompts[0], token, () if request.ignores_end else None,
            ids=ids, add_special_tokens=request.add_special_tokens,
        )  # fmt: skip
        if found is not None:
            asked = request.skip_special_tokens
            found.skip_special_tokens = (
                self._steps.skip_special_tokens if asked is None else asked
            )
        return found

    # ---- values -------------------------------------------------------------------------

    def _read(self, values: Mapping[str, Any]) -> _Read | None:
        """The values by receiver; None if one of them has an effect that is not plain."""
        prompt = values.get(self.pipeline.maps.text)
        if not isinstance(prompt, str):
            return None
        read = _Read(prompt)
        for name, value in values.items():
            source = self._sources.get(name)
            if source is None:
                if name in self._ignored:
                    continue
                return None
            for target in source.preprocessing:
                if target in _WORDS:
                    if value:
                        return None
                else:
                    read.preprocessing[target] = value
            for target in source.token:
                if target == _STREAMING:
                    read.is_streaming = bool(value)
                elif target in _OFF or target in _FURTHER_OUTPUTS:
                    if value:
                        return None
                elif target in _ONE:
                    if value != 1:
                        return None
                else:
                    read.token[target] = value
        return read

    def _add_ends(
        self, token: dict[str, Any], end: int | None, pad: int | None, wires: Sequence[str]
    ) -> None:
        """The ids that preprocessing hands on."""
        assert self._preprocessing is not None
        model = self._preprocessing
        for name, given, default in (
            ("end_id", end, model.tokenizer.end_id),
            ("pad_id", pad, model.pad_id),
        ):
            if name in wires:
                token[name] = given if given is not None else -1 if default is None else default

    # ---- checks -------------------------------------------------------------------------

    def _checked(
        self,
        request: InferRequest,
        prompt: str,
        token: dict[str, Any],
        end_ids: tuple[int, ...] | None,
        *,
        ids: list[int] | None = None,
        add_special_tokens: bool | None = None,
    ) -> PlainRequest | None:
        """The request, tokenized and checked as the models do; None if it is wrong.

        ``end_ids`` are further ids that end the output; None: those of the model.
        """
        began_ns = time.monotonic_ns()
        preprocessing, model = self._preprocessing, self._token
        if preprocessing is None or model is None or not model.is_ready:
            return None
        if MAX_DRAFT_TOKENS in request.parameters:
            return None
        facts = model.facts()
        vocab_size = int(facts["vocab_size"])
        longest = model.max_input_len
        try:
            if ids is None:
                if not preprocessing.tokenizer.is_short(prompt):
                    return None
                raw = prompt.encode()
                tokenizer = preprocessing.tokenizer
                tokenizer.limits.check_prompt("QUERY", len(raw), longest)
                special = (
                    preprocessing.add_special_tokens
                    if add_special_tokens is None
                    else add_special_tokens
                )
                ids = tokenizer.encode_short(prompt, special)
            check_request_type(request.parameters)
            sampling = read_fields(PlainInputs(token), vocab_size)
            salt = salted(request.parameters, b"")
        except (RequestError, UnicodeEncodeError):
            return None
        if not ids or longest is None or len(ids) > longest:
            return None
        if min(ids) < 0 or max(ids) >= vocab_size:
            return None
        wire = {name: value for name, value in sampling.items() if value != _DEFAULTS[name]}
        ends = self._steps.end_ids if end_ids is None else end_ids
        further = [e for e in ends if e < vocab_size and e != sampling.get("end_id", -1)]
        if further:
            wire["end_ids"] = tuple(further)
        one = OneSequence(pack_ids(ids), wire, salt)
        return PlainRequest(request, one, prompt, ids, time.monotonic_ns() - began_ns)


_DEFAULTS = {name: row.default for name, row in FIELDS.items()}


def _sources(
    preprocessing: Mapping[str, str], token: Mapping[str, str]
) -> tuple[dict[str, _Source], set[str]]:
    """The receivers of each input of the text model that a plain request may have, and the
    inputs that it may not have."""
    into_preprocessing = {"QUERY", "REQUEST_OUTPUT_LEN", "END_ID", "PAD_ID", *_WORDS}
    found: dict[str, _Source] = {}
    refused: set[str] = set()
    for target, source in preprocessing.items():
        if target not in into_preprocessing:
            refused.add(source)
        elif target != "QUERY":
            each = found.setdefault(source, _Source())
            each.preprocessing += (target,)
        else:
            found.setdefault(source, _Source())
    for target, source in token.items():
        if target not in _KNOWN:
            refused.add(source)
        else:
            found.setdefault(source, _Source()).token += (target,)
    return {name: each for name, each in found.items() if name not in refused}, refused
