"""The ids of one long text, encoded in parts, so that memory does not grow with the text.

The tokenizers library keeps some 400 bytes for each id until a text is encoded. A text of a
megabyte may have a million ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from trimaran.server.models.encoded_texts import Ids, encode

PART_CHARACTERS = 32 << 10
"""Longer texts are encoded in parts of this length."""

MARGIN_CHARACTERS = 1 << 10
"""A part is cut so far before its end that its end changes nothing before the cut."""

_MAX_ADDED_CHARACTERS = MARGIN_CHARACTERS // 4
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
"""A set of characters in a regular expression."""

_LOOKS_ELSEWHERE = re.compile(r"\(\?<[=!]|\\[bBAGzZ]|[\^$]")
"""Parts of a regular expression that look before a word, or for the end of the text."""


def encode_long(fast: FastTokenizer, text: str, add_special_tokens: bool) -> Ids:
    """The ids of a text, the same ids as those of the whole text at once.

    A cut lies where the pre-tokenizer begins a word, far enough from the end of the part. The
    rest of the text is then encoded like a text that begins there. A text is encoded at once
    where `can_be_cut` is false, and so is a word that is longer than a part. No other thread
    may use the tokenizer meanwhile.
    """
    if len(text) <= PART_CHARACTERS or not can_be_cut(fast):
        return encode(fast, [text], add_special_tokens).ids
    before, behind = _special_ids(fast) if add_special_tokens else ([], [])
    with _without_post_processor(fast):
        parts = [np.array(each, np.int32) for each in _parts(fast, text)]
    return np.concatenate([np.array(before, np.int32), *parts, np.array(behind, np.int32)])


def can_be_cut(fast: FastTokenizer) -> bool:
    """Whether the words of a text depend on no more than what follows them.

    Byte-level BPE with the usual expressions has such words; most models use that kind of
    tokenizer. A tokenizer that begins a text with a space, or whose words are whole texts, does
    not.
    """
    added = fast.get_added_tokens_decoder().values()
    return (
        type(fast.model).__name__ == "BPE"
        and not fast.model.dropout
        and _keeps_places(_state(fast.normalizer))
        and _is_local(_state(fast.pre_tokenizer))
        and all(
            len(token.content) <= _MAX_ADDED_CHARACTERS
            and not (token.lstrip or token.rstrip or token.single_word)
            for token in added
        )
    )


def _state(part: Any) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer as ``tokenizer.json`` describes it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _keeps_places(state: dict[str, Any] | None) -> bool:
    """Whether a normalizer does the same to a text behind a cut; cuts precede ASCII."""
    if state is None or state["type"] == "NFC":
        return True
    return state["type"] == "Sequence" and all(map(_keeps_places, state["normalizers"]))


def _is_local(state: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer looks at nothing before the word that it begins."""
    if state is None:
        return False
    if state["type"] == "Sequence":
        return all(map(_is_local, state["pretokenizers"]))
    if state["type"] == "Split":
        expression = state["pattern"].get("Regex")
        if expression is None or state["behavior"] != "Isolated":
            return False
        return not _LOOKS_ELSEWHERE.search(_CLASS.sub("", expression))
    if state["type"] == "ByteLevel":
        return state["add_prefix_space"] is False
    is_digits: bool = state["type"] == "Digits"
    return is_digits


def _parts(fast: FastTokenizer, text: str) -> Iterator[list[int]]:
    start, size = 0, PART_CHARACTERS
    while start + size < len(text):
        (found,) = fast.encode_batch([text[start : start + size]], add_special_tokens=False)
        num_ids, num_characters = _cut(found, text, start, size)
        if num_ids == 0:
            # A long word: a part of twice the length may end behind it.
            size *= 2
            continue
        yield found.ids[:num_ids]
        start, size = start + num_characters, PART_CHARACTERS
    yield _ids_of(fast, text[start:])


def _cut(found: Encoding, text: str, start: int, size: int) -> tuple[int, int]:
    """The last place for a cut: the number of ids and of characters before it; zeros where
    there is none."""
    for index in range(len(found) - 1, 0, -1):
        span = found.token_to_chars(index)
        if span is None or span[0] > size - MARGIN_CHARACTERS:
            continue
        if found.token_to_word(index) == found.token_to_word(index - 1):
            continue
        # Space that reaches the end of a part could belong to the word before it, and a
        # combining character too.
        following = text[start + span[0] : start + span[0] + 2]
        if following[0].isascii() and not following.isspace():
            return index, span[0]
    return 0, 0


def _ids_of(fast: FastTokenizer, text: str) -> list[int]:
    (found,) = fast.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def _special_ids(fast: FastTokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and behind a text."""
    word = _ids_of(fast, "a")
    (found,) = fast.encode_batch_fast(["a"], add_special_tokens=True)
    ids: list[int] = found.ids
    start = next(i for i in range(len(ids)) if ids[i : i + len(word)] == word)
    return ids[:start], ids[start + len(word) :]


@contextmanager
def _without_post_processor(fast: FastTokenizer) -> Iterator[None]:
    """Post-processors move the offsets of ids in the text."""
    found = fast.post_processor
    fast.post_processor = None
    try:
        yield
    finally:
        fast.post_processor = found
