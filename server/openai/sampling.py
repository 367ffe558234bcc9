"""The members that all generating requests share, as inputs of the token model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trimaran.server.models.sampling_inputs import MAX_WORD_BYTES
from trimaran.server.models.text_request import TextRequest, Value
from trimaran.server.openai.errors import ApiError
from trimaran.server.openai.fields import Fields, list_of

MAX_CHOICES = 128
MAX_STOP_WORDS = 1 << 10
MAX_BIASES = 1 << 12
MAX_TOP_LOGPROBS = 20
_MAX_ID = 1 << 24
_MAX_TOKENS = 1 << 30
_MAX_DRAFT_TOKENS = 1 << 10
_SEED_BITS = 63

_NUMBERS = (
    ("temperature", "temperature", 0.0, 2.0),
    ("presence_penalty", "presence_penalty", -2.0, 2.0),
    ("frequency_penalty", "frequency_penalty", -2.0, 2.0),
    ("min_p", "runtime_min_p", 0.0, 1.0),
    ("repetition_penalty", "repetition_penalty", 1e-6, 100.0),
)
"""A member, the token model's input, and the range."""

_NUMBER_NAMES = frozenset(name for name, *_ in _NUMBERS)
_RARE = frozenset((
    "n", "stop", "logit_bias", "min_tokens", "skip_special_tokens", "service_tier",
    "cache_salt", "max_draft_tokens",
))  # fmt: skip

IGNORED = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
"""Members that change no answer: accounts, and names under which OpenAI keeps answers."""


@dataclass(slots=True, kw_only=True)
class GenerationParams:
    """Sampling parameters, limits and form of the answer, the same for every sequence."""

    values: dict[str, Value] = field(default_factory=dict)
    """Inputs of the token model by name."""

    biases: dict[int, float] = field(default_factory=dict)
    stop_words: tuple[str, ...] = ()
    max_tokens: int | None = None
    num_sequences: int = 1
    ignores_end: bool = False
    skip_special_tokens: bool | None = None
    is_streaming: bool = False
    include_usage: bool = False
    service_tier: str | None = None
    cache_salt: str | None = None
    max_draft_tokens: int | None = None
    """Most draft tokens of a step; None for the engine's limit, 0 for none."""

    def fill(self, request: TextRequest, max_tokens: int) -> TextRequest:
        """Set these on a request; ``max_tokens`` is for requests that set no limit."""
        request.sampling = self.values
        if self.biases:
            bias = np.zeros(max(self.biases) + 1, np.float32)
            for token, value in self.biases.items():
                bias[token] = value
            request.sampling = {**self.values, "embedding_bias": bias}
        request.stop_words = self.stop_words
        request.max_tokens = max_tokens if self.max_tokens is None else self.max_tokens
        request.num_sequences = self.num_sequences
        request.ignores_end = self.ignores_end
        request.skip_special_tokens = self.skip_special_tokens
        request.is_streaming = self.is_streaming
        if self.cache_salt is not None:
            request.parameters["cache_salt"] = self.cache_salt
        if self.max_draft_tokens is not None:
            request.parameters["max_draft_tokens"] = self.max_draft_tokens
        return request


def read_generation_params(fields: Fields, *limits: str) -> GenerationParams:
    """The shared members of a request; ``limits`` are names of the limit on tokens.

    Raises:
        ApiError: a member of another type or out of range.
    """
    params = GenerationParams()
    if fields.has_any(_NUMBER_NAMES):
        for name, token_name, low, high in _NUMBERS:
            value = fields.number(name, low, high)
            if value is not None:
                params.values[token_name] = value
    _read_choice(fields, params)
    params.max_tokens = _limit(fields, limits)
    if fields.has_any(_RARE):
        _read_rare(fields, params)
    params.ignores_end = fields.boolean("ignore_eos") or False
    params.is_streaming = fields.boolean("stream") or False
    params.include_usage = _include_usage(fields, is_streaming=params.is_streaming)
    # The engine's figures tell how much of the prompt was cached.
    params.values["return_perf_metrics"] = True
    return params


def _read_rare(fields: Fields, params: GenerationParams) -> None:
    """The members of `_RARE`."""
    params.num_sequences = fields.integer("n", 1, MAX_CHOICES) or 1
    params.stop_words = _stop_words(fields)
    params.biases = _biases(fields)
    least = fields.integer("min_tokens", 0, _MAX_TOKENS)
    if least:
        params.values["min_tokens"] = least
    params.skip_special_tokens = fields.boolean("skip_special_tokens")
    params.service_tier = fields.choice(
        "service_tier", "auto", "default", "flex", "priority", "scale"
    )
    params.cache_salt = fields.text("cache_salt")
    params.max_draft_tokens = fields.integer("max_draft_tokens", 0, _MAX_DRAFT_TOKENS)


def read_log_probs(params: GenerationParams, *, num_top: int) -> None:
    """Ask for log-probabilities, and with ``num_top`` for what the likeliest are computed
    from."""
    params.values["return_log_probs"] = True
    if num_top:
        params.values["return_generation_logits"] = True


def _read_choice(fields: Fields, params: GenerationParams) -> None:
    """Which ids are drawn from. Without any filter the engine would be greedy."""
    top_p = fields.number("top_p", 0.0, 1.0)
    top_k = fields.integer("top_k", -1, _MAX_ID)
    if top_p == 0:
        # The smallest set of ids holds the likeliest alone.
        top_k = 1
    seed = fields.integer("seed", -(1 << _SEED_BITS), (1 << _SEED_BITS) - 1)
    if params.values.get("temperature") == 0 or top_k == 1:
        # Greedy, which a request is for the engine that asks for nothing.
        params.values.pop("temperature", None)
        return
    params.values["runtime_top_p"] = top_p or 1.0
    if top_k is not None and top_k > 0:
        params.values["runtime_top_k"] = top_k
    if seed is None:
        seed = secrets.randbits(_SEED_BITS)
    params.values["seed"] = seed % (1 << _SEED_BITS)


def _limit(fields: Fields, names: tuple[str, ...]) -> int | None:
    """The first limit that is given, as in Triton's OpenAI front end."""
    found = [fields.integer(name, 1, _MAX_TOKENS) for name in names]
    return next((value for value in found if value is not None), None)


def _stop_words(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if isinstance(value, str):
        _check_length([value])
        return (value,) if value else ()
    words = list_of(fields, "stop", str, "strings", MAX_STOP_WORDS) or []
    _check_length(words)
    return tuple(word for word in words if word)


def _check_length(words: list[str]) -> None:
    """Refuse long words where they are read, in a process if they are: models refuse them too.

    Raises:
        ApiError: names the length and the limit.
    """
    length = sum(map(len, words))
    if length > MAX_WORD_BYTES:
        raise ApiError(
            f"'stop' has {length} characters, and at most {MAX_WORD_BYTES} are allowed. Send "
            "fewer or shorter words.",
            param="stop",
        )


def _biases(fields: Fields) -> dict[int, float]:
    given = fields.member("logit_bias")
    if given is None:
        return {}
    members: dict[str, Any] = given.plain()
    if len(members) > MAX_BIASES:
        raise ApiError(
            f"'logit_bias' has {len(members)} ids, and at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    found = {}
    for name in members:
        if not (name.isascii() and name.isdigit() and int(name[:9]) < _MAX_ID) or len(name) > 9:
            raise ApiError(
                f"'logit_bias' names {name[:50]!r}, which is no token id", param="logit_bias"
            )
        found[int(name)] = given.number(name, -100.0, 100.0) or 0.0
    return found


def _include_usage(fields: Fields, *, is_streaming: bool) -> bool:
    options = fields.member("stream_options")
    if options is None:
        return False
    if not is_streaming:
        raise ApiError(
            "'stream_options' is only allowed when 'stream' is true", param="stream_options"
        )
    found = options.boolean("include_usage") or False
    options.finish("include_obfuscation")
    return found
