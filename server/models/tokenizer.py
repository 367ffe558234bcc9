"""Text to ids and back, with the special ids of a Hugging Face tokenizer folder."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenizers import Tokenizer as FastTokenizer

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import NoFileError, require_file, special_tokens

logger = logging.getLogger(__name__)

# Below this a hop to a thread costs more than the encoding itself.
_INLINE_CHARACTERS = 2048
# Above this a text takes so long that others must not wait behind it: tokenizers read some
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
            ConfigError: no folder, or no tokenizer that can be read or converted.
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
        """One more than the highest id: there may be gaps."""

        added = self._fast.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    async def run(self, work: Callable[[], T], num_characters: int) -> T:
        """Do work that encodes so many characters: much of it beside the event loop, very
        much of it beside other long texts too."""
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
        # Not `encode`: other threads, the event loop's among them, stand still during that.
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
