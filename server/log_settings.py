"""The log settings that clients may read and change while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.protocol.json_access import as_bool, as_string, as_unsigned

_LEVELS = {
    "log_info": logging.INFO,
    "log_warning": logging.WARNING,
    "log_error": logging.ERROR,
}
LOG_KINDS = tuple(_LEVELS)
"""Settings that say whether lines of a level are logged, the least first."""

FORMATS = ("default", "ISO8601")
_MAX_LEVEL = (1 << 32) - 1


def level_name(kinds: Mapping[str, bool], *, is_verbose: bool) -> str:
    """The level of which, and above, lines are logged; of ``kinds`` those that are missing
    are wanted."""
    if is_verbose:
        return "DEBUG"
    wanted = (level for kind, level in _LEVELS.items() if kinds.get(kind, True))
    return logging.getLevelName(next(wanted, logging.CRITICAL))


def unknown_format(value: str, kind: ErrorKind) -> RequestError:
    """The error of a log format; its kind is another over gRPC than over HTTP."""
    return RequestError(f"invalid argument for --log_format, got: {value}", kind)


class LogSettings:
    """What is logged. Changes take effect on the process's root logger."""

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

    def update(self, changes: dict[str, Any]) -> None:
        """Change some settings: all of them, or none on an error. None keeps a setting.

        Raises:
            RequestError: a value of the wrong type, or a setting that clients may not change.
        """
        accepted: dict[str, Any] = {}
        for name, value in changes.items():
            if value is None or name not in self._values:
                continue
            accepted[name] = self._checked(name, value)
        self._values |= accepted
        is_verbose = bool(self._values["log_verbose_level"])
        logging.getLogger().setLevel(level_name(self._values, is_verbose=is_verbose))

    @staticmethod
    def _checked(name: str, value: Any) -> Any:
        if name in LOG_KINDS:
            return as_bool(value, f"'{name}'")
        if name == "log_verbose_level":
            # What gRPC has no number for is as verbose as can be.
            return min(as_unsigned(value, f"'{name}'"), _MAX_LEVEL)
        if name == "log_file":
            raise RequestError(
                "log file location can not be updated through network protocol",
                ErrorKind.UNSUPPORTED,
            )
        if as_string(value, f"'{name}'") not in FORMATS:
            raise unknown_format(value, ErrorKind.UNAVAILABLE)
        return value
