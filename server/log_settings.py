"""The log settings that clients may read and change while the server runs."""

from __future__ import annotations

import logging
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.json_access import as_bool, as_string, as_unsigned

_FLAGS = ("log_info", "log_warning", "log_error")
FORMATS = ("default", "ISO8601")
_MAX_LEVEL = (1 << 32) - 1


def unknown_format(value: str, kind: ErrorKind) -> RequestError:
    """The error of a log format; its kind is another over gRPC than over HTTP."""
    return RequestError(f"invalid argument for --log_format, got: {value}", kind)


class LogSettings:
    """What is logged. Changes take effect on the process's root logger."""

    def __init__(self, verbose_level: int = 0) -> None:
        self._values: dict[str, Any] = {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
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
        logging.getLogger().setLevel(self._level())

    @staticmethod
    def _checked(name: str, value: Any) -> Any:
        if name in _FLAGS:
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

    def _level(self) -> int:
        if self._values["log_verbose_level"]:
            return logging.DEBUG
        for name, level in zip(
            _FLAGS, (logging.INFO, logging.WARNING, logging.ERROR), strict=True
        ):
            if self._values[name]:
                return level
        return logging.CRITICAL
