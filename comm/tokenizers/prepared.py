"""A tokenizer that needs no transformers, and its two files in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

TOKENIZER_FILE = "tokenizer.json"
FACTS_FILE = "facts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Attributes that transformers gives a tokenizer beside its ``tokenizer.json``."""

    class_name: str
    """The class of transformers that read the folder."""

    end_id: int | None = None
    pad_id: int | None = None
    cleans_up: bool = False
    """Whether decoded text loses the spaces before punctuation and contractions."""

    splits_special_tokens: bool = False
    """Whether special tokens that a text spells are encoded as ordinary text."""

    notes: tuple[str, ...] = ()
    """Log messages for the operator about the way that the folder was read."""

    digest: str = ""
    """SHA-256 of ``tokenizer.json``."""


@dataclass(frozen=True, slots=True)
class PreparedTokenizer:
    """A complete ``tokenizer.json`` and the facts beside it."""

    raw: bytes = field(repr=False)
    facts: TokenizerFacts

    @classmethod
    def load(cls, folder: Path) -> PreparedTokenizer:
        """Read both files.

        Raises:
            OSError, ValueError: they are missing, or are not what was written.
        """
        facts = json.loads((folder / FACTS_FILE).read_bytes())
        raw = (folder / TOKENIZER_FILE).read_bytes()
        if not isinstance(facts, dict) or facts.get("digest") != _digest(raw):
            raise ValueError(f"{folder} does not hold what was written there")
        try:
            facts["notes"] = tuple(facts.get("notes", ()))
            return cls(raw, TokenizerFacts(**facts))
        except TypeError as error:
            raise ValueError(f"{folder / FACTS_FILE}: {error}") from error

    def fast(self) -> FastTokenizer:
        """The tokenizer, which neither pads nor cuts.

        Raises:
            Exception: ``raw`` is none.
        """
        return read_tokenizer(self.raw, self.facts.splits_special_tokens)


def write_prepared(folder: Path, raw: bytes, facts: dict[str, Any]) -> None:
    """Write both files of a tokenizer; ``facts`` are fields of `TokenizerFacts`."""
    complete = TokenizerFacts(**{**facts, "digest": _digest(raw)})
    (folder / TOKENIZER_FILE).write_bytes(raw)
    (folder / FACTS_FILE).write_text(json.dumps(asdict(complete)))


def read_tokenizer(raw: bytes, splits_special_tokens: bool = False) -> FastTokenizer:
    """The tokenizer of a ``tokenizer.json``, which neither pads nor cuts.

    Raises:
        Exception: ``raw`` is none.
    """
    fast = FastTokenizer.from_buffer(raw)
    fast.no_padding()
    fast.no_truncation()
    # The only setting that the file does not hold.
    fast.encode_special_tokens = splits_special_tokens
    return fast


_CLEAN_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"),
    (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""The replacements of transformers' ``clean_up_tokenization``, in order."""

CLEAN_UP_CHARACTERS = frozenset("".join(old for old, _ in _CLEAN_UP))
"""The characters that a replacement looks at; any other character separates replacements."""


def cleaned_up(text: str) -> str:
    """Decoded text without the spaces before punctuation and contractions."""
    for old, new in _CLEAN_UP:
        text = text.replace(old, new)
    return text


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
