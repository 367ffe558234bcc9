"""The tokenizer of a client, for prompts and answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import special_tokens

TYPES = ("auto", "t5", "llama")


class Vocabulary:
    """A Hugging Face tokenizer folder. Loads no torch."""

    def __init__(self, folder: str) -> None:
        """Load the folder.

        Raises:
            ConfigError: the folder does not exist, or holds no tokenizer.
        """
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(f"--tokenizer-dir {folder} is not a folder")
        self._tokenizer = self._load()
        self._tokens = special_tokens(self._folder, ("eos_token", "pad_token"))
        self.end_id = self._special_id("eos_token")
        pad_id = self._special_id("pad_token")
        self.pad_id = self.end_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _load(self) -> Any:
        from tokenizers import Tokenizer

        path = self._folder / "tokenizer.json"
        if not path.exists():
            return self._load_slow()
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error

    def _load_slow(self) -> Any:
        """A tokenizer in an older format, converted in memory."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(self._folder))
            return tokenizer.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"--tokenizer-dir {self._folder}: {error}") from error

    def _special_id(self, name: str) -> int | None:
        """The id of the token with the role ``name`` in the folder's settings."""
        text = self._tokens.get(name)
        number: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return number
