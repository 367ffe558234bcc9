"""`trimaran fill-template`: puts values into the ${...} placeholders of a template."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from string import Template

from trimaran.comm.errors import ConfigError
from trimaran.comm.files.input_files import UTF8, require_file
from trimaran.comm.files.output_files import replace_text

# Substituted without a given value too: the documented default is "no limit".
DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}


def split_escaped(text: str, separator: str) -> list[str]:
    """Split at separators that no backslash protects; each backslash is consumed."""
    parts, current = [], ""
    characters = iter(text)
    for character in characters:
        if character == "\\":
            current += next(characters, "")
        elif character == separator:
            parts.append(current)
            current = ""
        else:
            current += character
    return [*parts, current]


def parse_substitutions(text: str) -> dict[str, str]:
    """Read ``key:value,key2:value2``. A comma in a value is ``\\,``; a colon ``\\\\:``.

    Raises:
        ConfigError: a part is not one key and one value.
    """
    values = {}
    for part in split_escaped(text, ","):
        pair = split_escaped(part, ":")
        if len(pair) != 2:
            raise ConfigError(
                f"substitution {part!r} is not key:value. Write a comma inside a value as "
                "'\\,' and a colon as '\\\\:'"
            )
        values[pair[0]] = pair[1]
    return values


def fill(text: str, values: dict[str, str]) -> str:
    """Substitute placeholders; those without a value stay as they are."""
    return Template(text).safe_substitute({**DEFAULTS, **values})


def placeholders(text: str) -> set[str]:
    """The names that ``fill`` can still give values to."""
    found = Template.pattern.finditer(text)
    return {match["named"] or match["braced"] for match in found} - {None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``trimaran fill-template``."""
    parser.add_argument("file_path", help="path of the template")
    parser.add_argument("substitutions", help="key:value,key2:value2")
    parser.add_argument("-i", "--in-place", action="store_true", help="overwrite the file")


def run(args: argparse.Namespace) -> int:
    """Print the filled template, or with ``-i`` overwrite it."""
    path = Path(args.file_path)
    try:
        if args.in_place:
            # Replacing a pipe by a file would hide the output from the pipe's reader.
            require_file(path)
        text = path.read_text(encoding=UTF8)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {path}: {why}") from error
    values = parse_substitutions(args.substitutions)
    for key in values:
        if key not in text:
            raise ConfigError(f"key '{key}' does not exist in the file {path}.")
    # As in the tool of Triton's TensorRT-LLM backend: scripts fill a file twice.
    for key in sorted(values.keys() - placeholders(text)):
        print(
            f"trimaran fill-template: {path} has no ${{{key}}} left to fill: what stands there "
            "stays. Edit the file to change it.",
            file=sys.stderr,
        )
    filled = fill(text, values)
    if args.in_place:
        try:
            replace_text(path, filled)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    else:
        print(filled, end="")
    return 0
