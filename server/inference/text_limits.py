"""How long the texts may be that a model tokenizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from trimaran.comm.errors import RequestError

_MIN_LIMIT = 1 << 20
_BYTES_PER_TOKEN = 16
"""Bytes of a prompt's token: four times the bytes of a token of common text."""

_CHUNK_CHARACTERS = 1 << 20

MAX_WORD_IDS = 1 << 16
"""Most ids of the stop words, or of the bad words, of one sample, and most words of an input.
Longer lists would slow down each step for all requests.
"""


def refuse_many(name: str, count: int, what: str) -> None:
    """Refuse more words, or ids of words, than `MAX_WORD_IDS`.

    Raises:
        RequestError: the limit is exceeded.
    """
    if count > MAX_WORD_IDS:
        raise RequestError(
            f"input '{name}' holds {count} {what} but may hold at most {MAX_WORD_IDS}; send "
            "fewer"
        )


@dataclass(frozen=True, slots=True)
class TextLimits:
    """How long the texts are that one tokenizer takes."""

    longest_token_bytes: int | None
    max_text_bytes: int = 0
    """What the operator set; 0: by the engine's longest prompt."""

    def most_bytes(self, max_input_len: int | None) -> int:
        """The longest text that is tokenized, for an engine of this longest prompt or none."""
        most = max(_MIN_LIMIT, _BYTES_PER_TOKEN * (max_input_len or 0))
        return self.max_text_bytes or most

    def check_prompt(self, name: str, num_bytes: int, max_input_len: int | None) -> None:
        """Refuse a prompt that cannot be short enough for an engine, before it is tokenized.

        ``max_input_len`` is that of the engine; None: the text is for no engine that is known.

        Raises:
            RequestError: names the bytes, the limit and the remedy.
        """
        longest = self.longest_token_bytes
        if max_input_len is not None and longest is not None:
            limit = max_input_len * longest
            if num_bytes > limit:
                raise RequestError(
                    f"Prompt length exceeds maximum input length ({max_input_len}): input "
                    f"'{name}' has {num_bytes} bytes, and {max_input_len} tokens have at most "
                    f"{limit}, as the longest has {longest}. Shorten the prompt, or build the "
                    "engine with a larger --max-input-len."
                )
        limit = self.most_bytes(max_input_len)
        if num_bytes > limit:
            raise RequestError(
                f"input '{name}' has {num_bytes} bytes but may have at most {limit}. Shorten "
                "the text, or start the server with a larger --max-text-bytes."
            )


@dataclass(frozen=True, slots=True)
class PromptBound:
    """How long the texts of a model may be, for a process that only decodes requests."""

    limits: TextLimits
    inputs: tuple[str, ...]
    """The inputs that hold prompts."""

    max_input_len: int | None = None
    """That of the engine; None: the prompts are for no engine that is known."""

    prefix: str = ""
    """Begins the errors of a composed model."""

    words: tuple[str, ...] = ()
    """The inputs that hold words, such as stop words."""

    def check(self, name: str, values: Collection[Any]) -> None:
        """Refuse values of an input from JSON, if they are prompts that are too long, or too
        many words.

        Raises:
            RequestError: as for `TextLimits.check_prompt` and `refuse_many`.
        """
        if name not in self.inputs and name not in self.words:
            return
        try:
            if name in self.words:
                refuse_many(name, len(values), "words")
                return
            for value in values:
                if isinstance(value, str):
                    self.limits.check_prompt(name, _num_bytes(value), self.max_input_len)
        except RequestError as error:
            raise RequestError(f"{self.prefix}{error}", error.kind) from None


@runtime_checkable
class PromptModel(Protocol):
    """A model that can tell how long its prompts may be."""

    @property
    def prompt_bound(self) -> PromptBound | None:
        """The bound at this time; None: there is none, or user code reads the prompts."""
        ...


def prompt_bound(model: object) -> PromptBound | None:
    """The bound of a model that can tell."""
    return model.prompt_bound if isinstance(model, PromptModel) else None


def _num_bytes(text: str) -> int:
    """The bytes of a text in UTF-8, without a copy of the whole text."""
    if text.isascii():
        return len(text)
    return sum(
        len(text[start : start + _CHUNK_CHARACTERS].encode("utf-8", "surrogateescape"))
        for start in range(0, len(text), _CHUNK_CHARACTERS)
    )
