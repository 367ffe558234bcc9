"""Headers of clients that reach models as parameters, chosen by the operator's pattern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.linear_pattern import LinearPattern
from trimaran.server.inference.request import InferRequest

MAX_NAME = 256
"""A longer name matches no pattern: the time of a match grows with the name."""

_NUM_KEPT = 1024
_KEEPS_CASE = "(?-i)"
_RESERVED = frozenset((
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers",
    "binary_data_output",
))  # fmt: skip
_RESERVED_PREFIX = "triton_"


def compiled(flag: str, pattern: str) -> LinearPattern:
    """A pattern as Triton reads it: without regard to case, unless it starts with ``(?-i)``.

    Raises:
        ConfigError: names the flag and the fault.
    """
    flags = 0 if pattern.startswith(_KEEPS_CASE) else re.IGNORECASE
    try:
        return LinearPattern(pattern.removeprefix(_KEEPS_CASE), flags)
    except ValueError as error:
        raise ConfigError(
            f"{flag} is {pattern!r}, which is no regular expression for names of headers: "
            f"{error}. Correct it."
        ) from None


class HeaderForwarding:
    """Adds the matching headers of a request to its parameters."""

    def __init__(self, flag: str, pattern: str) -> None:
        """An empty pattern forwards nothing.

        Raises:
            ConfigError: as for `compiled`.
        """
        self._pattern = compiled(flag, pattern) if pattern else None
        # Clients repeat a few names.
        self._matches = lru_cache(maxsize=_NUM_KEPT)(self._is_match)

    def apply(
        self, request: InferRequest, headers: Iterable[tuple[str | bytes, str | bytes]]
    ) -> None:
        """Store the matching headers under their names as they came.

        Raises:
            RequestError: a matching name is reserved.
        """
        if self._pattern is None:
            return
        for raw, value in headers:
            name = _text(raw)
            if len(name) > MAX_NAME or not self._matches(name):
                continue
            if name.lower() in _RESERVED or name.lower().startswith(_RESERVED_PREFIX):
                raise RequestError(
                    f"the header '{name}' has the name of a reserved parameter and is not "
                    "forwarded. Send it under another name."
                )
            request.parameters[name] = _text(value)

    def _is_match(self, name: str) -> bool:
        assert self._pattern is not None
        return self._pattern.search(name)


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode("utf-8", "surrogateescape")
