"""Text to ids and ids to text, with the special ids of a Hugging Face tokenizer folder."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from trimaran.comm.tokenizers.end_ids import end_ids_of, named_ids
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.comm.tokenizers.prepared import CLEAN_UP_CHARACTERS, cleaned_up
from trimaran.server.inference.text_limits import TextLimits
from trimaran.server.models import encoded_texts
from trimaran.server.models.encoded_texts import EncodedTexts, Ids, WordForms
from trimaran.server.models.text_limits import longest_token_bytes
from trimaran.server.models.tokenizer_pool import TokenizerPool, TokenizerSource

# Shorter texts are encoded at once: a hop to a thread costs more.
_INLINE_CHARACTERS = 2048
# Above this a hop to a process costs less than what the event loop would wait for a thread.
_LONG_CHARACTERS = 32 << 10
INLINE_IDS = 1024
"""More ids than these are not decoded on the event loop: they take a millisecond."""

_LONG_IDS = 32 << 10
# Encoding one more text costs as much as this many characters.
_TEXT_CHARACTERS = 8
_NUM_THREADS = 2

_METASPACE = "\u2581"


def _bytes_by_character() -> dict[str, int]:
    """The byte of each character of byte-level tokens: printable ones stand for themselves, the
    others for characters from U+0100 on, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    found = {chr(byte): byte for byte in plain}
    found.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return found


_BYTE_OF = _bytes_by_character()


class _Pieces(dict[int, bytes]):
    """The bytes of each id in the texts of a byte-level tokenizer, looked up once each."""

    def __init__(self, fast: FastTokenizer) -> None:
        super().__init__()
        self._fast = fast

    def __missing__(self, token_id: int) -> bytes:
        token: str = self._fast.id_to_token(token_id) or ""
        # The library takes a token with any other character as it is, and added tokens like
        # the others.
        is_plain = all(character in _BYTE_OF for character in token)
        found = bytes(_BYTE_OF[c] for c in token) if is_plain else token.encode()
        self[token_id] = found
        return found


T = TypeVar("T")


class Tokenizer:
    """One tokenizer folder. Methods are safe from any thread."""

    def __init__(
        self, folder: str, pool: TokenizerPool | None = None, max_text_bytes: int = 0
    ) -> None:
        """Load the folder. ``pool`` takes what is long; by default a process of its own does.
        ``max_text_bytes`` is that of `TextLimits`.

        Raises:
            ConfigError: the folder is missing, or its tokenizer cannot be read or converted.
        """
        prepared = prepare(folder)
        self.folder = folder
        self._pool = pool or TokenizerPool(1)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._source = TokenizerSource(prepared)
        self._fast = prepared.fast()
        self.facts = prepared.facts
        self.end_id = prepared.facts.end_id
        pad_id = prepared.facts.pad_id
        self.pad_id = self.end_id if pad_id is None else pad_id
        self.end_ids = end_ids_of(prepared, folder)
        """The ids that end an output for which the client names none: the tokenizer's own, and
        those of the model whose files lie in the folder."""

        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.num_ids = max(ids, default=-1) + 1
        """One more than the highest id; ids may have gaps."""

        added = self._fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.word_forms = WordForms.of(self._fast)
        self.limits = TextLimits(longest_token_bytes(self._fast), max_text_bytes)
        self._added_ids = frozenset(added)
        self._is_byte_level = self._fast.token_to_id("\u0120") is not None
        self._pieces: _Pieces | None = None
        if isinstance(self._fast.decoder, decoders.ByteLevel):
            self._pieces = _Pieces(self._fast)

    async def encode(self, texts: list[str], add_special_tokens: bool) -> EncodedTexts:
        """The ids of each text: of short texts at once, of longer ones in a thread, of long
        ones in a process.

        Raises:
            RequestError: the process ended; the request may be sent again.
        """
        size = sum(map(len, texts)) + _TEXT_CHARACTERS * len(texts)
        if size > _LONG_CHARACTERS:
            return await self._pool.encode(self._source, texts, add_special_tokens)
        if size > _INLINE_CHARACTERS:
            return await self.in_thread(partial(self.encode_each, texts, add_special_tokens))
        return self.encode_each(texts, add_special_tokens)

    @staticmethod
    def is_short(text: str) -> bool:
        """Whether `encode_short` takes a text."""
        return len(text) + _TEXT_CHARACTERS <= _INLINE_CHARACTERS

    def encode_short(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a short text, at once, without arrays."""
        (found,) = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    async def decode_each(
        self, ids: EncodedTexts, skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each list of ids; where as for `encode`.

        Raises:
            RequestError: as for `encode`.
        """
        if len(ids.ids) > _LONG_IDS:
            return await self._pool.decode(self._source, ids, skip_special_tokens)
        work = partial(
            encoded_texts.decode, self._fast, ids, skip_special_tokens, self.facts.cleans_up
        )
        return work() if len(ids.ids) <= INLINE_IDS else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work in one of the tokenizer's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode_now(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        found: list[int] = self.encode_each([text], add_special_tokens).ids.tolist()
        return found

    def encode_each(self, texts: list[str], add_special_tokens: bool) -> EncodedTexts:
        """The ids of each text, at once."""
        return encoded_texts.encode(self._fast, texts, add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids."""
        text = self.decode_raw(ids, skip_special_tokens)
        return cleaned_up(text) if self.facts.cleans_up else text

    def decode_raw(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids, with the spaces that cleaning up takes out."""
        text: str
        if len(ids) > INLINE_IDS:
            # Other threads, the event loop's among them, stand still during `decode`.
            (text,) = self._fast.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        else:
            text = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, prompt_ids: Sequence[int] | Ids, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """What turns the ids behind a prompt into text as they come."""
        if self._pieces is not None:
            return ByteDetokenizer(self, self._pieces, prompt_ids, skip_special_tokens)
        return WindowDetokenizer(self, prompt_ids, skip_special_tokens)

    def named(self, ids: tuple[int, ...]) -> str:
        """Ids with their tokens, for messages."""
        return named_ids(self._fast, ids)

    @property
    def special_texts(self) -> list[str]:
        """The special tokens."""
        texts = (self._fast.id_to_token(token_id) for token_id in sorted(self.special_ids))
        return [text for text in texts if text]

    def token_text(self, token_id: int) -> str:
        """The text of one id alone, with the space that may begin it; a part of a character
        is a replacement character.
        """
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id alone; empty for an id outside the vocabulary."""
        token: str | None = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if self._is_byte_level and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes((int(token[3:5], 16),))
        return token.replace(_METASPACE, " ").encode()


# Ids before a new one that determine its text, such as a leading space.
_CONTEXT_IDS = 6
# A character has at most 4 bytes, so at most 3 ids wait for its last byte.
_MAX_OPEN_IDS = 3
# The window is cut back to its context at this length: decoding a longer one costs more than
# the second decoding that the cut requires.
_MAX_WINDOW_IDS = 24
# A model that emits only broken bytes must not make each step decode all of them again.
_MAX_HELD_IDS = 32
_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(ABC):
    """Turns ids into deltas whose concatenation is the text of all ids. Ids that end inside a
    character wait for more. The cost of a step does not grow with the sequence.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._dropped = tokenizer.special_ids if skip_special_tokens else frozenset()
        """Ids without text."""

        self._cleaner = _Cleaner() if tokenizer.facts.cleans_up else None

    def push(self, ids: list[int], is_last: bool = False) -> str:
        """The text that these ids complete; with ``is_last`` all remaining text."""
        delta = self._delta(ids, is_last)
        return delta if self._cleaner is None else self._cleaner.push(delta, is_last)

    @abstractmethod
    def _delta(self, ids: list[int], is_last: bool) -> str:
        """`push`, with the spaces that cleaning up takes out."""

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._dropped]

    def _end_of(self, prompt_ids: Sequence[int] | Ids, count: int) -> list[int]:
        """The last ids of a prompt that have text, at most ``count``."""
        found: list[int] = []
        for token in reversed(prompt_ids):
            if token not in self._dropped:
                found.append(int(token))
            if len(found) == count:
                break
        return found[::-1]


class ByteDetokenizer(IncrementalDetokenizer):
    """For tokenizers whose texts are the bytes of their ids one behind the other.

    A look-up for each id takes a fraction of the time in which the library decodes a window.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        pieces: Mapping[int, bytes],
        prompt_ids: Sequence[int] | Ids,
        skip_special_tokens: bool = True,
    ) -> None:
        """``pieces`` are the bytes of each id."""
        super().__init__(tokenizer, skip_special_tokens)
        self._pieces = pieces
        self._rest = b""
        """The beginning of a character whose end has not come."""

        # A prompt of ids may end inside a character.
        self._delta(self._end_of(prompt_ids, _MAX_OPEN_IDS), False)

    def _delta(self, ids: list[int], is_last: bool) -> str:
        pieces, dropped = self._pieces, self._dropped
        raw = self._rest + b"".join([pieces[token] for token in ids if token not in dropped])
        # Broken bytes become the same replacement characters as in the library.
        text, num_bytes = utf_8_decode(raw, "replace", is_last)
        self._rest = raw[num_bytes:]
        return text


class WindowDetokenizer(IncrementalDetokenizer):
    """For all tokenizers: two windows over the ids are decoded, with and without the new ones,
    and their difference is the delta.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | Ids,
        skip_special_tokens: bool = True,
    ) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Skipped ids have no text; as context they would hide the space before the next id.
        self._ids = self._end_of(prompt_ids, _CONTEXT_IDS + _MAX_OPEN_IDS)
        self._num_shown, self._shown_text = 0, ""
        self._show(len(self._ids))

    def _delta(self, ids: list[int], is_last: bool) -> str:
        self._ids += self._kept(ids)
        if len(self._ids) == self._num_shown:
            return ""
        end, text = self._complete(is_last)
        if end == self._num_shown:
            return ""
        delta = text[len(self._shown_text) :]
        if end < _MAX_WINDOW_IDS:
            self._num_shown, self._shown_text = end, text
        else:
            self._show(end)
        return delta

    def _complete(self, is_last: bool) -> tuple[int, str]:
        """The number of ids that form whole characters, and their text."""
        num_ids = len(self._ids)
        text = self._decode(self._ids)
        if is_last or not text.endswith(_REPLACEMENT):
            return num_ids, text
        first = max(self._num_shown, num_ids - 1 - _MAX_OPEN_IDS)
        for end in range(num_ids - 1, first, -1):
            part = self._decode(self._ids[:end])
            if not part.endswith(_REPLACEMENT):
                return end, part
        if num_ids - self._num_shown > _MAX_HELD_IDS:
            return num_ids, text
        return self._num_shown, self._shown_text

    def _show(self, end: int) -> None:
        """Make the last of the first ``end`` ids the context of the following ids."""
        size = min(_CONTEXT_IDS, end)
        text = self._decode(self._ids[end - size : end])
        # A context that starts inside a character could spoil the bytes that follow it.
        for _ in range(_MAX_OPEN_IDS):
            if size == end or not text.startswith(_REPLACEMENT):
                break
            size += 1
            text = self._decode(self._ids[end - size : end])
        self._ids = self._ids[end - size :]
        self._num_shown = size
        self._shown_text = text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode_raw(ids, self._skip)


# A longer tail of characters that cleaning up looks at is passed on as it is.
_MAX_UNCLEAN = 64


class _Cleaner:
    """Cleans decoded text up as the text grows, and holds back what may still change."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str, is_last: bool) -> str:
        """The cleaned text that is settled now; with ``is_last`` all remaining text."""
        text = self._held + text
        end = len(text)
        if not is_last:
            while end and text[end - 1] in CLEAN_UP_CHARACTERS:
                end -= 1
            if len(text) - end > _MAX_UNCLEAN:
                end = len(text)
        self._held = text[end:]
        return cleaned_up(text[:end])
