"""The process that encodes long texts and decodes long lists of ids for a front end."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from trimaran.comm.tokenizers.prepared import PreparedTokenizer
from trimaran.server.inference.helper_process import serve_front_end
from trimaran.server.memory import return_freed
from trimaran.server.models.encoded_texts import EncodedTexts, decode, encode
from trimaran.server.models.long_texts import encode_long

_LARGE_BYTES = 64 << 10
"""What a text of this length took is returned to the system: an id takes some 200 bytes while
a text is encoded."""

MAX_TOKENIZERS = 4
"""A process keeps the tokenizers that it used last."""


@dataclass(frozen=True, slots=True)
class TokenizerTask:
    """Texts to encode, or ids to decode."""

    tokenizer: int
    """The tokenizer's number in the front end."""

    texts: list[str]
    ids: EncodedTexts | None
    """If there are some, they are decoded."""

    special_tokens: bool
    """Whether encoding adds them, or decoding skips them."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class TokenizerFault:
    """A task failed."""

    text: str
    """The traceback."""


ValueT = TypeVar("ValueT")


class LastUsed(OrderedDict[int, ValueT]):
    """Values by a tokenizer's number, of the `MAX_TOKENIZERS` that were used last.

    The front end has an equal cache for each process, and so sends no tokenizer twice.
    """

    def use(self, number: int, make: Callable[[], ValueT]) -> ValueT:
        """The value, made if the tokenizer is not known."""
        found = self.pop(number) if number in self else make()
        self[number] = found
        while len(self) > MAX_TOKENIZERS:
            self.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True)
class _Known:
    """A tokenizer that was sent."""

    fast: FastTokenizer
    cleans_up: bool

    @classmethod
    def of(cls, prepared: PreparedTokenizer) -> _Known:
        return cls(prepared.fast(), prepared.facts.cleans_up)


def main() -> None:
    """Encode or decode for one task after the other."""
    known: LastUsed[_Known] = LastUsed()

    def serve(connection: Connection) -> None:
        task: TokenizerTask = connection.recv()
        connection.send(_answer(connection, task, known))
        if task.num_bytes > _LARGE_BYTES:
            return_freed()

    serve_front_end(serve)


def _answer(
    connection: Connection, task: TokenizerTask, known: LastUsed[_Known]
) -> EncodedTexts | list[str] | TokenizerFault:
    try:
        tokenizer = known.use(task.tokenizer, lambda: _Known.of(connection.recv()))
        if task.ids is not None:
            return decode(tokenizer.fast, task.ids, task.special_tokens, tokenizer.cleans_up)
        if len(task.texts) == 1:
            ids = encode_long(tokenizer.fast, task.texts[0], task.special_tokens)
            return EncodedTexts(ids, np.array([len(ids)], np.int64))
        return encode(tokenizer.fast, task.texts, task.special_tokens)
    except Exception:
        return TokenizerFault(traceback.format_exc())
