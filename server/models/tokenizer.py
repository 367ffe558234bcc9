"""Text to ids and ids to text, with the special ids of a Hugging Face tokenizer folder."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as FastTokenizer

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import NoFileError, require_file, special_tokens

logger = logging.getLogger(__name__)

# Shorter texts are encoded at once: a hop to a thread costs more.
_INLINE_CHARACTERS = 2048
# Longer texts get a thread of their own, so that others do not wait: tokenizers read some
# million characters a second.
_HUGE_CHARACTERS = 1 << 20
_CONVERT = (
    "import sys, transformers; "
    "transformers.AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
)
_CONVERT_TIMEOUT_S = 300.0

T = TypeVar("T")


class Tokenizer:
    """One tokenizer folder. Methods are safe from any thread."""

    def __init__(self, folder: str, num_threads: int = 2) -> None:
        """Load the folder.

        Raises:
            ConfigError: the folder is missing, or its tokenizer cannot be read or converted.
        """
        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(f"tokenizer_dir {folder} is not a folder")
        self.folder = folder
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._huge = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-huge")
        if (path / "tokenizer.json").exists():
            self._load(path)
        else:
            with tempfile.TemporaryDirectory(prefix="trimaran-tokenizer-") as scratch:
                _convert(path, Path(scratch))
                self._load(Path(scratch))

    def _load(self, path: Path) -> None:
        try:
            require_file(path / "tokenizer.json")
            self._fast = FastTokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise ConfigError(f"{path}/tokenizer.json cannot be read: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        tokens = special_tokens(path, ("eos_token", "pad_token"))
        self.end_id = self._special_id(tokens.get("eos_token"))
        pad_id = self._special_id(tokens.get("pad_token"))
        self.pad_id = self.end_id if pad_id is None else pad_id
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.num_ids = max(ids, default=-1) + 1
        """One more than the highest id; ids may have gaps."""

        added = self._fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    async def run(self, work: Callable[[], T], num_characters: int) -> T:
        """Run work that encodes ``num_characters`` characters: long texts in a thread, very
        long texts in a thread of their own."""
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        is_huge = num_characters > _HUGE_CHARACTERS
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._huge if is_huge else self._threads, work)

    def encode_now(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        (ids,) = self.encode_each([text], add_special_tokens)
        return ids

    def encode_each(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text."""
        # Not `encode`, which blocks all other threads, including the event loop.
        found = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [each.ids for each in found]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids."""
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _special_id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._fast.token_to_id(token)
        return found


def _convert(folder: Path, target: Path) -> None:
    """Convert a slow tokenizer, in a child: transformers imports torch."""
    logger.info("Converting the tokenizer of %s to tokenizer.json", folder)
    try:
        for path in folder.iterdir():
            require_file(path)
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CONVERT, str(folder), str(target)],
            capture_output=True,
            text=True,
            timeout=_CONVERT_TIMEOUT_S,
            check=False,
        )
    except NoFileError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error}") from error
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"tokenizer_dir {folder} has no tokenizer.json, and converting it took more than "
            f"{_CONVERT_TIMEOUT_S:.0f} s. Save it with transformers "
            "(AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))."
        ) from None
    if done.returncode != 0 or not (target / "tokenizer.json").exists():
        reason = done.stderr.strip().splitlines()[-1:] or ["no tokenizer.json came out"]
        raise ConfigError(
            f"tokenizer_dir {folder} has no tokenizer.json and cannot be converted: {reason[0]}"
        )


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


class IncrementalDetokenizer:
    """Turns ids into deltas whose concatenation is the text of all ids.

    Two windows over the ids are decoded, with and without the new ones, and their
    difference is the delta; ids that end inside a character wait for more.
    The cost of a step does not grow with the sequence.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: list[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # Skipped ids have no text; as context they would hide the space before the next id.
        self._dropped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ids = self._kept(prompt_ids)
        self._num_shown, self._shown_text = 0, ""
        self._show(len(self._ids))

    def push(self, ids: list[int], is_last: bool = False) -> str:
        """The text that these ids complete; with ``is_last`` all remaining text."""
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
        return self._tokenizer.decode(ids, self._skip)

    def _kept(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._dropped]
