"""How many bytes of a text a token of a tokenizer can be at most, and how many a prompt has."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from trimaran.comm.errors import RequestError

_COMPOSED = 3
"""NFC shortens a text to a third at most: Hangul syllables of three letters."""

_BYTES = 256
_KEEPING_NORMALIZERS = {"Prepend": 1, "ByteLevel": 1, "NFC": _COMPOSED}
"""By how much these shorten a text at most."""

_KEEPING_SPLITS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
"""Pre-tokenizers that drop nothing. `Split` and `Punctuation` may be told to."""


def check_prompt_length(num_tokens: int, max_input_len: int) -> None:
    """Refuse a prompt that is longer than an engine takes.

    Raises:
        RequestError: names the length, the limit and the remedy.
    """
    if num_tokens > max_input_len:
        raise RequestError(
            f"Prompt length ({num_tokens}) exceeds maximum input length ({max_input_len}). "
            "Shorten the prompt, or build the engine with a larger --max-input-len."
        )


def longest_token_bytes(fast: FastTokenizer) -> int | None:
    """The most bytes of a text that one id can stand for.

    None where there is no bound: the tokenizer drops or replaces parts of a text, joins unknown
    characters into one id, or strips the space around special tokens.
    """
    shrink = _shrink(_state(fast.normalizer))
    added = fast.get_added_tokens_decoder().values()
    if (
        shrink is None
        or not _keeps_all(_state(fast.pre_tokenizer))
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return None
    vocabulary = fast.get_vocab(with_added_tokens=False)
    is_byte_level = "ByteLevel" in _types(_state(fast.pre_tokenizer)) or "ByteLevel" in _types(
        _state(fast.normalizer)
    )
    if not _has_all_bytes(fast, vocabulary, is_byte_level):
        return None
    sizes = [len(token) if is_byte_level else len(token.encode()) for token in vocabulary]
    sizes += [len(token.content.encode()) for token in added]
    return max(sizes, default=1) * shrink


def _has_all_bytes(
    fast: FastTokenizer, vocabulary: dict[str, int], is_byte_level: bool
) -> bool:
    """Whether every byte has an id, so that nothing is unknown."""
    kind = type(fast.model).__name__
    if is_byte_level:
        return kind == "BPE" and all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    has_fallback = kind == "BPE" and bool(fast.model.byte_fallback)
    return has_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTES))


def _state(part: Any) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer as ``tokenizer.json`` describes it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _types(state: dict[str, Any] | None) -> list[str]:
    """The type of a part, and of the parts that it consists of."""
    if state is None:
        return []
    children = state.get("normalizers") or state.get("pretokenizers") or []
    return [str(state.get("type")), *(name for child in children for name in _types(child))]


def _shrink(state: dict[str, Any] | None) -> int | None:
    """By how much a normalizer shortens a text at most; None: there is no bound."""
    if state is None:
        return 1
    if state["type"] == "Sequence":
        factor = 1
        for child in state["normalizers"]:
            found = _shrink(child)
            if found is None:
                return None
            factor *= found
        return factor
    if state["type"] == "Replace":
        pattern = state["pattern"].get("String")
        is_shorter = pattern is None or len(state["content"].encode()) < len(pattern.encode())
        return None if is_shorter else 1
    return _KEEPING_NORMALIZERS.get(state["type"])


def _keeps_all(state: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    if state is None or state["type"] in _KEEPING_SPLITS:
        return True
    if state["type"] == "Sequence":
        return all(_keeps_all(child) for child in state["pretokenizers"])
    return state["type"] in ("Split", "Punctuation") and state["behavior"] != "Removed"
