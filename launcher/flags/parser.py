"""The argument parser of every `trimaran` command: spellings, run files, help on a screen."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trimaran.comm.errors import ConfigError


class FlagParser(argparse.ArgumentParser):
    """Flags may be written with ``_`` or ``-`` and may come from a YAML file.

    An error is one line on stderr and exit code 2. Flags hidden by `hide` are omitted from
    ``--help`` and appear in ``--help-all``.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)
        self._hidden: set[str] = set()
        self._flag_takers: set[str] = set()
        self._single: dict[str, str] = {}

    def hide(self, *dests: str) -> None:
        """Omit the flags of these destinations from the short help."""
        self._hidden.update(dests)

    def take_flags(self, *options: str) -> None:
        """The values of these flags may be flags themselves, as in ``--sbatch --exclusive``."""
        self._flag_takers.update(options)

    def take_one(self, dest: str, remedy: str) -> None:
        """A command line may give the flag of this destination one value, and not replace it
        by a second one; the value overrides a run file's.
        """
        self._single[dest] = remedy

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        print(f"{self.prog}: error: {message} ({self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``, after the flags of the file that its ``--config`` names."""
        own = self._words(argv)
        self._refuse_second_values(own)
        for number, word in enumerate(own):
            if word == "--help-all":
                for parser in self._with_subcommands():
                    getattr(parser, "_hidden", set()).clear()
                own[number] = "--help"
            elif word == "--config" and number + 1 < len(own):
                own = self._file_flags(Path(own[number + 1])) + own
            elif word.startswith("--config="):
                own = self._file_flags(Path(word.partition("=")[2])) + own
        return self.parse_args(own)

    def parse_words(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv`` alone, ignoring ``--config``."""
        return self.parse_args(self._words(argv))

    def format_help(self) -> str:
        """The help text, without hidden flags."""
        shown = {action: action.help for action in self._actions}
        for action in self._actions:
            if action.dest in self._hidden:
                action.help = argparse.SUPPRESS
        try:
            text = super().format_help()
        finally:
            for action, help_text in shown.items():
                action.help = help_text
        return text + ("\nAll flags: --help-all\n" if self._hidden else "")

    def _respell(self, word: str) -> str:
        """The declared spelling of a long flag, written with ``_`` or ``-``."""
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        return f"{self._declared(name) or name}{equals}{value}"

    def _words(self, argv: Sequence[str]) -> list[str]:
        return self._with_flag_values([self._respell(word) for word in argv])

    def _with_flag_values(self, words: Sequence[str]) -> list[str]:
        """The words, with values that look like flags joined to the preceding flag."""
        joined: list[str] = []
        for word in words:
            if joined and joined[-1] in self._flag_takers:
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined

    def _refuse_second_values(self, words: Sequence[str]) -> None:
        found: dict[str, set[str]] = {}
        for word, after in zip(words, [*words, ""][1:], strict=True):
            name, equals, value = word.partition("=")
            action = self._option_string_actions.get(name)
            if action is not None and action.dest in self._single:
                found.setdefault(action.dest, set()).add(value if equals else after)
        for dest, values in found.items():
            if len(values) > 1:
                flag = f"--{dest.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} has the values {', '.join(sorted(values))}, but takes one. "
                    f"{self._single[dest]}."
                )

    def _declared(self, name: str) -> str | None:
        for parser in self._with_subcommands():
            for option in parser._option_string_actions:
                if option.replace("_", "-") == name.replace("_", "-"):
                    return option
        return None

    def _with_subcommands(self) -> list[argparse.ArgumentParser]:
        """This parser and those of its subcommands."""
        groups = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return [self, *(parser for group in groups for parser in group.choices.values())]

    def _file_flags(self, path: Path) -> list[str]:
        """The flags of a YAML file of ``name: value`` lines."""
        import yaml  # imported only if a run file is used

        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"--config {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            where = " ".join(str(error).split())
            raise ConfigError(f"--config {path}: is not YAML: {where}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"--config {path}: must hold lines of the form `flag: value`")
        flags: list[str] = []
        for key, value in values.items():
            flags += self._flag_words(path, str(key), value)
        return flags

    def _flag_words(self, path: Path, key: str, value: object) -> list[str]:
        option = self._declared("--" + key.lstrip("-"))
        own = self._option_string_actions
        if option is None or option == "--config" or option not in own:
            known = [name[2:] for name in own if name[:2] == "--"]
            near = difflib.get_close_matches(key.replace("_", "-"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--config {path}: {self.prog} has no flag {key!r}{hint}")
        action = own[option]
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"--config {path}: {key} is {value!r}, not true or false")
            opposite = option.replace("--", "--no-", 1)
            no = [opposite] if own.get(opposite) is action else []
            return [option] if value else no
        if value is None:
            return []
        if isinstance(value, list):
            words = [_as_word(path, key, item) for item in value]
            if action.nargs is not None:
                return [option, *words]
            return [f"{option}={word}" for word in words]
        return [f"{option}={_as_word(path, key, value)}"]


def _as_word(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float) and "\0" not in str(value):
        return str(value)
    raise ConfigError(f"--config {path}: {key} is {value!r}, not a single value")
