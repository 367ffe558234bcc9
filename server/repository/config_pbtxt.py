"""Reads a model's config.pbtxt and says what is wrong with it by file and line."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import read_text, unreadable

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}|\$(\w+)")
# A quoted string, or a comment to the end of the line: places where a placeholder is legal.
_QUOTED_OR_COMMENT = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|#[^\n]*")
_POSITION = re.compile(r"^\d+:\d+ : ")
_FIELD_BEFORE = re.compile(r"(\w+)\s*:?\s*[\[{]?\s*$")


def read_config(path: Path) -> ModelConfig:
    """Parse one config.pbtxt.

    A placeholder left inside quotes stays in the value, where it means "not set".

    Raises:
        ConfigError: unreadable, a placeholder outside quotes, or not a ModelConfig; the
            message names file, line and remedy.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"{path}:", error) from error
    _refuse_open_placeholder(path, text)
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        line = error.GetLine()
        place = f"{path}:{line}" if line is not None else str(path)
        what = _POSITION.sub("", str(error))
        raise ConfigError(f"{place}: not a valid model configuration: {what}") from error


def is_placeholder(value: str) -> bool:
    """Whether a parameter's value is a template's placeholder that nobody filled."""
    return _PLACEHOLDER.fullmatch(value.strip()) is not None


def open_placeholders(text: str) -> list[re.Match[str]]:
    """Placeholders outside strings and comments, where only a value is legal."""
    # Blanked rather than removed, so that positions stay those of the text.
    bare = _QUOTED_OR_COMMENT.sub(lambda found: " " * len(found.group()), text)
    return list(_PLACEHOLDER.finditer(bare))


def placeholder_names(found: list[re.Match[str]]) -> list[str]:
    """Their names, each once, in the order of the text."""
    return list(dict.fromkeys(match.group(1) or match.group(2) for match in found))


def _refuse_open_placeholder(path: Path, text: str) -> None:
    found = open_placeholders(text)
    if not found:
        return
    start = found[0].start()
    line = text.count("\n", 0, start) + 1
    before = _FIELD_BEFORE.search(text[:start])
    field = f" of field '{before.group(1)}'" if before else ""
    # All of them at once: otherwise each start of the server would name the next one.
    names = placeholder_names(found)
    others = f" (nor are {', '.join(names[1:])})" if len(names) > 1 else ""
    raise ConfigError(
        f"{path}:{line}: the placeholder ${{{names[0]}}}{field} is not filled{others}. Fill: "
        f"trimaran fill-template -i {path} {','.join(f'{name}:VALUE' for name in names)}"
    )
