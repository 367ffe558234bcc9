"""The tokenizer of a client, for prompts and answers."""

from __future__ import annotations

from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.comm.tokenizers.prepare import prepare
from trimaran.comm.tokenizers.prepared import cleaned_up

TYPES = ("auto", "t5", "llama")


class Vocabulary:
    """A Hugging Face tokenizer folder. Loads no torch."""

    def __init__(self, folder: str) -> None:
        """Load the folder.

        Raises:
            ConfigError: the folder does not exist, or its tokenizer cannot be read.
        """
        if not Path(folder).is_dir():
            raise ConfigError(f"--tokenizer-dir {folder} is not a folder")
        prepared = prepare(folder)
        self._tokenizer = prepared.fast()
        self._cleans_up = prepared.facts.cleans_up
        self.end_id = prepared.facts.end_id
        pad_id = prepared.facts.pad_id
        self.pad_id = self.end_id if pad_id is None else pad_id

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of some ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return cleaned_up(text) if self._cleans_up else text
