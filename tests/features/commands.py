"""Writes docs/commands.md: every command and flag, from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from trimaran.launcher.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "commands.md"
Rows = dict[str, str]
"""Texts for flags, by their names."""

_FEW = 3
"""Flags that a command may lack of those of another, to be told by its name."""

HEAD = """# Every command and flag

What `trimaran COMMAND --help-all` says. `_` and `-` are the same in a flag's name, and
`--config FILE` reads any set of a command's flags from YAML. `make features` writes this page.
"""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command line that takes flags, by the words before them."""
    for name in cli.SUBCOMMANDS:
        yield from _below(f"trimaran {name}", cli.parser_of(name))


def _below(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from _below(f"{name} {word}", child)


def flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's own flags and words, help and sub-commands aside."""
    kinds = (argparse._HelpAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, kinds)]


def meaning(action: argparse.Action) -> str:
    """The help of a flag, its default filled in."""
    return (action.help or "") % vars(action)


def page() -> str:
    """The page's text."""
    text, told = HEAD, dict[str, Rows]()
    for name, parser in parsers():
        if rows := _rows(parser):
            text += f"\n## `{name}`\n\n{_like_another(rows, told) or _table(rows)}"
            told[name] = rows
    return text


def _rows(parser: argparse.ArgumentParser) -> Rows:
    return {
        _names(action): _cell(meaning(action))
        for action in flags(parser)
        if action.dest != "config"
    }


def _table(rows: Rows) -> str:
    lines = "".join(f"| {names} | {text} |\n" for names, text in rows.items())
    return f"| flag | |\n| --- | --- |\n{lines}"


def _like_another(rows: Rows, told: dict[str, Rows]) -> str:
    """A sentence that replaces a table similar to an earlier table; empty without such a
    table."""
    for name, others in told.items():
        lacking = [names for names in others if names not in rows]
        if rows.items() <= others.items() and len(lacking) <= _FEW < len(rows):
            but = f" but {', '.join(lacking)}" if lacking else ""
            return f"The flags of `{name}`{but}.\n"
    return ""


def _names(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        metavar = action.metavar or ""
        value = " ".join(metavar) if isinstance(metavar, tuple) else str(metavar)
        if action.choices is not None and not value:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        value = value or action.dest.upper()
    names = list(action.option_strings)
    if not names:
        return f"`{_cell(value)}`"
    names[0] = f"{names[0]} {value}".rstrip()
    return ", ".join(f"`{_cell(name)}`" for name in names)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
