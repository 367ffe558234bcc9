"""The special tokens that the files of a tokenizer's folder name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import parse_json, read_text, unreadable

FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Older tokenizers have the second; where both name a token, the first counts."""


def special_tokens(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The texts of the tokens of these names (``eos_token``) that the folder gives.

    Raises:
        ConfigError: a file cannot be read, or a token is none; names file, key and value.
    """
    found: dict[str, str] = {}
    for file_name in FILES:
        path = folder / file_name
        values = _object(path) if path.exists() else {}
        for name in names:
            text = _text(path, name, values.get(name))
            if text:
                found.setdefault(name, text)
    return found


def _object(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(read_text(path))
    except OSError as error:
        raise unreadable(f"{path}:", error) from error
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}: holds a {type(values).__name__}, not an object. Copy the folder again."
        )
    return values


def _text(path: Path, name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        return text
    if token is None:
        return ""
    raise ConfigError(
        f"{path}: {name} is {token!r} but must be a string, or an object whose content is one. "
        "Write the token's text there, not its id."
    )
