"""The ids of many texts in one array, and the tokenizer calls that make and read them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as FastTokenizer

from trimaran.comm.tokenizers.prepared import cleaned_up

Ids = npt.NDArray[np.int32]

NO_IDS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """The ids of texts, one text behind the other."""

    ids: Ids
    lengths: npt.NDArray[np.int64]
    """Number of ids of each text."""

    def __len__(self) -> int:
        return len(self.lengths)

    def part(self, start: int, stop: int) -> EncodedTexts:
        """The texts from ``start`` up to ``stop``; a view."""
        first = int(self.lengths[:start].sum())
        lengths = self.lengths[start:stop]
        return EncodedTexts(self.ids[first : first + int(lengths.sum())], lengths)

    def each(self) -> list[Ids]:
        """The ids of each text; views."""
        return np.split(self.ids, np.cumsum(self.lengths)[:-1]) if len(self) else []

    def word_list(self) -> npt.NDArray[np.int32]:
        """The texts as the ``[2, L]`` list of words, without texts that have no ids: the ids,
        and the end of each word, with -1 behind the last end."""
        ends = np.full(len(self.ids), -1, np.int32)
        last = np.cumsum(self.lengths[self.lengths > 0])
        ends[: len(last)] = last
        return np.stack((self.ids, ends))


NOTHING = EncodedTexts(NO_IDS, np.empty(0, np.int64))
"""No texts at all."""


def joined(parts: list[EncodedTexts]) -> EncodedTexts:
    """The texts of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    parts = parts or [NOTHING]
    return EncodedTexts(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def encode(fast: FastTokenizer, texts: list[str], add_special_tokens: bool) -> EncodedTexts:
    """The ids of each text."""
    # Not `encode`, which blocks all other threads, including the event loop.
    found = fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    lists = [each.ids for each in found]
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    ids = np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum()))
    return EncodedTexts(ids, lengths)


def decode(
    fast: FastTokenizer, ids: EncodedTexts, skip_special_tokens: bool, cleans_up: bool
) -> list[str]:
    """The text of each list of ids; for ``cleans_up`` see `TokenizerFacts`."""
    lists = [each.tolist() for each in ids.each()]
    # Not `decode`, which blocks them too.
    texts: list[str] = fast.decode_batch(lists, skip_special_tokens=skip_special_tokens)
    return [cleaned_up(text) for text in texts] if cleans_up else texts


_PROBES = ("a", "x")
_BEFORE = ("\n", "\u2603", "|", "0", "\u4e2d")
"""Texts to put before a word; the first whose ids do not merge with those of a word is used."""

_NUM_FORMS = 3


@dataclass(frozen=True, slots=True)
class WordForms:
    """The ids of a bad or stop word wherever its text may stand.

    Tokenizers of the SentencePiece kind put a blank before a text: ``foo`` is encoded as if
    the word followed a space. In an output the word may also follow a letter, a bracket or a
    new line, with other ids. A word with a blank of its own would get a second blank, which no
    output has.
    """

    before: str
    """A text that a word is put behind."""

    before_ids: tuple[int, ...]

    @classmethod
    def of(cls, fast: FastTokenizer) -> WordForms | None:
        """None for a tokenizer whose words have the same ids at the begin of a text."""
        for before in _BEFORE:
            head = _encode(fast, before)
            behind = [_encode(fast, before + probe) for probe in _PROBES]
            if not head or any(ids[: len(head)] != head for ids in behind):
                continue
            alone = [_encode(fast, probe) for probe in _PROBES]
            if alone == [ids[len(head) :] for ids in behind]:
                return None
            return cls(before, tuple(head))
        return None

    def texts(self, words: list[str]) -> list[str]:
        """The texts whose ids `forms` takes: three for each word."""
        found = []
        for word in words:
            # A blank of the word's own stands for the one that the tokenizer puts there.
            found += [word, self.before + word, word[1:] if word.startswith(" ") else ""]
        return found

    def forms(self, encoded: EncodedTexts) -> EncodedTexts:
        """The different ids of each word, of the encoded `texts`."""
        each, size = encoded.each(), len(self.before_ids)
        known: set[bytes] = set()
        found: list[Ids] = []
        for index, ids in enumerate(each):
            if index % _NUM_FORMS == 1:
                if tuple(ids[:size].tolist()) != self.before_ids:
                    continue
                ids = ids[size:]
            key = ids.tobytes()
            if len(ids) and key not in known:
                known.add(key)
                found.append(ids)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        return EncodedTexts(np.concatenate([encoded.ids[:0], *found]), lengths)


def _encode(fast: FastTokenizer, text: str) -> list[int]:
    ids: list[int] = fast.encode(text, add_special_tokens=False).ids
    return ids
