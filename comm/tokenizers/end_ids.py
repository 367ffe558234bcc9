"""The ids that end a model's output, as the files beside its weights name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_json_object
from trimaran.comm.tokenizers.prepared import PreparedTokenizer

GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
_KEY = "eos_token_id"
MAX_FILE_END_IDS = 8
"""Most end ids of a file: those of a tokenizer's folder and of an engine's go into a request
together."""

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where configurations of several parts hold that of the language model."""


def model_end_ids(folder: str | Path) -> tuple[int, ...]:
    """The end ids of ``generation_config.json``, or else of ``config.json``; none if neither
    file names one. Each id comes once, in the file's order.

    Raises:
        ConfigError: a file cannot be read, or names what is no id, or too many.
    """
    for name in (GENERATION_FILE, CONFIG_FILE):
        path = Path(folder) / name
        if not path.exists():
            continue
        values = read_json_object(path)
        parts = (values, *(values.get(part) for part in _TEXT_PARTS))
        for part in parts:
            ids = _ids(path, part.get(_KEY)) if isinstance(part, dict) else ()
            if ids:
                return ids
    return ()


def _ids(path: Path, value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for each in values:
        if type(each) is not int or not 0 <= each < 1 << 31:
            raise ConfigError(
                f"{path}: {_KEY} is {value!r} but must be an id, or a list of ids, of 0 or "
                "more. Correct the file, or take the key out."
            )
    found = tuple(dict.fromkeys(values))
    if len(found) > MAX_FILE_END_IDS:
        raise ConfigError(
            f"{path}: {_KEY} names {len(found)} ids, but at most {MAX_FILE_END_IDS} can end an "
            "output. Leave out those that the model does not write."
        )
    return found


def end_ids_of(prepared: PreparedTokenizer, folder: str | Path) -> tuple[int, ...]:
    """The tokenizer's own end id, then those of the model whose files lie in its folder.

    Raises:
        ConfigError: see `model_end_ids`.
    """
    own = () if prepared.facts.end_id is None else (prepared.facts.end_id,)
    return tuple(dict.fromkeys((*own, *model_end_ids(folder))))


def named_ids(fast: FastTokenizer, ids: tuple[int, ...]) -> str:
    """Ids with their tokens, for messages: ``1 ('</s>'), 2``."""
    tokens = [(number, fast.id_to_token(number)) for number in ids]
    return ", ".join(f"{n}" if token is None else f"{n} ({token!r})" for n, token in tokens)


def summary(prepared: PreparedTokenizer, folder: str | Path) -> str:
    """The class of a tokenizer, the number of its ids, and the ids that end an output.

    Raises:
        ConfigError: see `model_end_ids`.
    """
    fast = prepared.fast()
    ends = named_ids(fast, end_ids_of(prepared, folder)) or "none"
    num_ids = fast.get_vocab_size(with_added_tokens=True)
    return f"{prepared.facts.class_name}, {num_ids} ids, end ids: {ends}"
