"""Restricted APIs as in Triton: a header and its value open a category of endpoints."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.comm.errors import ConfigError

CATEGORIES = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)

ADMIN_CATEGORIES = frozenset(("model-repository", "trace", "logging"))
"""Changes the server for all clients: what the administration port serves, where it is open."""

SERVING_ONLY = frozenset(("inference", "shared-memory"))
"""What the administration port does not serve."""


def parse_categories(text: str, where: str) -> frozenset[str]:
    """The categories of a list with commas between, of ``all``, or of ``none``.

    Raises:
        ConfigError: an unknown name; the message begins with ``where``.
    """
    if text == "all":
        return frozenset(CATEGORIES)
    names = [] if text == "none" else text.split(",")
    _check(names, where)
    return frozenset(names)


def _check(names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in CATEGORIES:
            raise ConfigError(
                f"{where}: unknown category '{name}'. Categories are {', '.join(CATEGORIES)}."
            )


GRPC_PREFIX = "triton-grpc-protocol-"
"""Comes before the key of ``--grpc-restricted-protocol`` in the metadata of a call."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that a request of a category must have."""

    header: str
    value: str = field(repr=False)

    def is_met(self, shown: str | None) -> bool:
        """Whether a header has the value; takes as long for every wrong one."""
        return shown is not None and hmac.compare_digest(_raw(shown), _raw(self.value))


def parse_restrictions(
    settings: Sequence[str], flag: str, *, prefix: str = "", environ: Mapping[str, str]
) -> dict[str, Restriction]:
    """The restrictions of ``CATEGORY,...:KEY=VALUE`` settings, by category.

    A value ``env:NAME`` or ``file:PATH`` is read from there, so that no list of processes
    shows it. ``prefix`` comes before each key.

    Raises:
        ConfigError: a setting of another form, an unknown category, one in two groups, or a
            value that cannot be read. No message holds a value.
    """
    kind = "api" if flag == "--http-restricted-api" else "protocol"
    found: dict[str, Restriction] = {}
    for setting in settings:
        names, colon, pair = setting.partition(":")
        key, equals, value = pair.partition("=")
        if not (names and colon and key and equals and value):
            raise ConfigError(
                f"{flag} option format is '<{kind}>,<{kind}>:<key>=<value>'. Correct the flag "
                f"that begins with '{names.partition('=')[0]}'."
            )
        # Names of metadata are in lower case; headers of HTTP are in any.
        header = (prefix + key).lower() if prefix else key
        restriction = Restriction(header, read_secret(value, f"{flag} {names}:{key}", environ))
        for name in names.split(","):
            if name not in CATEGORIES:
                raise ConfigError(
                    f"unknown restricted {kind} '{name}'. {flag} takes {', '.join(CATEGORIES)}."
                )
            if name in found:
                raise ConfigError(
                    f"restricted {kind} '{name}' can not be specified in multiple config "
                    f"groups. Leave it in one {flag}."
                )
            found[name] = restriction
    return found


def read_secret(value: str, where: str, environ: Mapping[str, str] = os.environ) -> str:
    """A value itself, or what ``env:NAME`` or ``file:PATH`` holds, less a last line's end.

    Raises:
        ConfigError: no such variable, an unreadable file, or nothing in them.
    """
    source, colon, name = value.partition(":")
    if not colon or source not in ("env", "file"):
        return value
    if source == "env":
        secret = environ.get(name, "")
    else:
        try:
            secret = Path(name).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise ConfigError(f"{where}: cannot read the value from {name}: {reason}") from None
    if not secret:
        raise ConfigError(f"{where}: {value} is empty or not set. Put the value there.")
    return secret


def secret_variables(settings: Sequence[str]) -> list[str]:
    """The environment variables that hold values of these settings."""
    values = (setting.partition(":")[2].partition("=")[2] for setting in settings)
    return [value[len("env:") :] for value in values if value.startswith("env:")]


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
