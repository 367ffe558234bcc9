"""Log and trace settings that clients may read and change while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.protocol.json_access import (
    as_bool,
    as_list,
    as_object,
    as_string,
    as_unsigned,
)

_LEVELS = {
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
LOG_KINDS = tuple(_LEVELS)
"""Settings that enable the lines of a level, least severe first."""

FORMATS = ("default", "ISO8601")
_MAX_LEVEL = (1 << 32) - 1


def level_name(kinds: Mapping[str, bool], *, is_verbose: bool) -> str:
    """The lowest level that is logged; ``kinds`` that are missing are enabled."""
    if is_verbose:
        return "DEBUG"
    wanted = (level for kind, level in _LEVELS.items() if kinds.get(kind, True))
    return logging.getLevelName(next(wanted, logging.CRITICAL))


def log_file_refused() -> RequestError:
    """The error of a log file, which clients may not choose."""
    return RequestError(
        "log file location can not be updated through network protocol", ErrorKind.UNSUPPORTED
    )


class LogSettings:
    """The log settings. Changes take effect on the process's root logger."""

    def __init__(self, verbose_level: int = 0, kinds: Mapping[str, bool] | None = None) -> None:
        """``kinds`` are as in `level_name`."""
        self._values: dict[str, Any] = {
            "log_file": "",
            **{kind: (kinds or {}).get(kind, True) for kind in LOG_KINDS},
            "log_verbose_level": verbose_level,
            "log_format": "default",
        }

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return dict(self._values)

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change some settings: all of them, or none on an error.

        Raises:
            RequestError: as for `checked_log_changes`.
        """
        self._values |= checked_log_changes(changes)
        is_verbose = bool(self._values["log_verbose_level"])
        logging.getLogger().setLevel(level_name(self._values, is_verbose=is_verbose))


def checked_log_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of settings that exist. A None value keeps a setting.

    Raises:
        RequestError: a value of the wrong type, or a setting that clients may not change.
    """
    return {
        name: _log_value(name, value)
        for name, value in changes.items()
        if value is not None and name in _LOG_SETTINGS
    }


_LOG_SETTINGS = frozenset(("log_file", *LOG_KINDS, "log_verbose_level", "log_format"))


def _log_value(name: str, value: Any) -> Any:
    if name in LOG_KINDS:
        return as_bool(value, "")
    if name == "log_verbose_level":
        # A level beyond gRPC's range means the most verbose.
        return min(as_unsigned(value, ""), _MAX_LEVEL)
    if name == "log_file":
        raise log_file_refused()
    if as_string(value, "") not in FORMATS:
        raise RequestError(
            f"invalid argument for --log_format, got: {value}", ErrorKind.UNAVAILABLE
        )
    return value


_DEFAULTS: dict[str, list[str]] = {
    "trace_level": ["OFF"],
    "trace_rate": ["1000"],
    "trace_count": ["-1"],
    "log_frequency": ["0"],
    "trace_file": [""],
    "trace_mode": ["triton"],
}
_RANGES = {
    "trace_rate": (0, (1 << 32) - 1),
    "trace_count": (-1, (1 << 31) - 1),
    "log_frequency": (0, (1 << 32) - 1),
}
_MAX_DIGITS = 20

Changes = Mapping[str, Sequence[str] | None]
"""Values by setting; None resets a setting."""


class TraceSettings:
    """Trace settings of the server and of single models.

    Tracing needs a file, which clients cannot name while the server runs. The level therefore
    stays OFF and nothing is traced, as on Triton started without a trace file.
    """

    def __init__(self) -> None:
        self.changed: dict[str, dict[str, list[str]]] = {}
        """Changed settings by model; the server's under an empty name."""

    def values(self, model: str = "") -> dict[str, list[str]]:
        """All settings of a model, or of the server."""
        return _DEFAULTS | self.changed.get("", {}) | self.changed.get(model, {})

    def update(self, model: str, changes: Changes) -> None:
        """Change some settings of a model, or of the server: all of them, or none on an error.

        Raises:
            RequestError: a value that is not allowed, or a setting that clients may not change.
        """
        values = dict(self.changed.get(model, {}))
        for name, value in changes.items():
            if name == "trace_file":
                raise RequestError(
                    "trace file location can not be updated through network protocol",
                    ErrorKind.UNSUPPORTED,
                )
            if not value:
                values.pop(name, None)
            elif name == "trace_level":
                values[name] = _level(value)
            elif name in _RANGES:
                values[name] = [_number(name, value)]
        self.changed[model] = values


def _level(value: Sequence[str]) -> list[str]:
    if "OFF" in value and len(value) > 1:
        raise RequestError("Expect only one trace level 'OFF' is specified")
    for level in value:
        if level not in ("OFF", "TIMESTAMPS", "TENSORS"):
            raise _unparsable("trace_level", level)
        if level != "OFF":
            raise RequestError(
                "Attempting to set invalid trace setting :trace file name is not given"
            )
    return ["OFF"]


def _number(name: str, value: Sequence[str]) -> str:
    text = value[0]
    if len(value) != 1:
        raise RequestError(f"expect only 1 value for '{name}'")
    is_number = text.isascii() and text.removeprefix("-").isdecimal()
    if not is_number or len(text) > _MAX_DIGITS:
        raise _unparsable(name, text)
    least, most = _RANGES[name]
    if name == "trace_count" and int(text) < least:
        raise RequestError(f"Unable to parse '{name}'. Expecting value >= -1, got:{text}")
    if not least <= int(text) <= most:
        raise RequestError(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}"
        )
    return text


def _unparsable(name: str, value: str) -> RequestError:
    return RequestError(f"Unable to parse '{name}', got: {value}")


def changes_of_json(document: object) -> Changes:
    """The changes that a JSON body requests.

    Raises:
        RequestError: a value of the wrong type.
    """
    changes: dict[str, Sequence[str] | None] = {}
    for name, value in as_object(document, "the trace settings").items():
        if (name != "trace_level" and name not in _RANGES) or value is None:
            # The mode is shown and never changed; the file is refused whatever its value.
            changes[name] = None
        elif name == "trace_level":
            changes[name] = [as_string(level, "") for level in as_list(value, "")]
        else:
            changes[name] = [as_string(value, "")]
    return changes


def json_of_values(values: Mapping[str, list[str]]) -> dict[str, str | list[str]]:
    """Settings as HTTP clients see them: levels as a list, others as text."""
    return {n: list(v) if n == "trace_level" else v[0] for n, v in values.items()}
