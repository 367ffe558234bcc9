"""API keys: a file of names, categories and keys, read again when it changes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.comm.errors import ConfigError
from trimaran.server.access.restrictions import parse_categories

logger = logging.getLogger(__name__)

MIN_KEY_LENGTH = 16
_MAX_SHOWN = 4096
_ANONYMOUS = "anonymous"
_DIGEST = "sha256:"
_OPEN = frozenset(("health",))
"""Served without a key, unless the file says otherwise: probes and load balancers have none."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its digest, and what it opens."""

    name: str
    digest: bytes = field(repr=False)
    categories: frozenset[str]


@dataclass(frozen=True, slots=True)
class KeySet:
    """The content of a file of keys."""

    keys: tuple[ApiKey, ...]
    open: frozenset[str] = _OPEN
    """Categories that need no key."""

    def find(self, authorization: str) -> ApiKey | None:
        """The key that an ``Authorization`` header shows, as ``Bearer`` or as the password of
        ``Basic`` with the key's name; None if there is none of these."""
        shown, name = _credentials(authorization)
        digest = hashlib.sha256(shown).digest()
        found = None
        # Every key is compared: the time tells nothing of the keys.
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest) and name in (None, key.name):
                found = key
        return found


class KeyFile:
    """A `KeySet` that follows its file. A file that cannot be read leaves the last keys."""

    def __init__(self, path: str) -> None:
        """Raises:
        ConfigError: the file cannot be read, or a line is wrong.
        """
        self.path = path
        self.current = read_keys(path)
        warn_if_readable(path)

    def reload(self) -> None:
        """Read the file again."""
        try:
            self.current = read_keys(self.path)
        except ConfigError as error:
            logger.error("%s The former %d keys stay.", error, len(self.current.keys))
        else:
            logger.info("API keys of %s: %d keys", self.path, len(self.current.keys))


def read_keys(path: str) -> KeySet:
    """The keys of a file of lines ``NAME CATEGORY,... KEY``.

    ``KEY`` is the key or ``sha256:`` and its digest in hexadecimal. ``all`` is every category.
    A line ``anonymous CATEGORY,...`` names what needs no key (``none``: nothing; without the
    line: health). Empty lines and lines that begin with ``#`` say nothing.

    Raises:
        ConfigError: names the line, never a key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-keys {path}: {reason}.") from None
    keys: dict[str, ApiKey] = {}
    open_to_all = _OPEN
    for number, line in _lines(text):
        where = f"--api-keys {path}, line {number}"
        name, *rest = line.split()
        if name == _ANONYMOUS and len(rest) == 1:
            open_to_all = parse_categories(rest[0], where)
            continue
        if len(rest) != 2 or name == _ANONYMOUS:
            raise ConfigError(
                f"{where}: {len(rest) + 1} words, but a line is NAME CATEGORY,... KEY, or "
                f"{_ANONYMOUS} CATEGORY,... without a key."
            )
        key = ApiKey(name, _digest(rest[1], where), parse_categories(rest[0], where))
        if name in keys or any(key.digest == other.digest for other in keys.values()):
            raise ConfigError(f"{where}: the name '{name}' or its key is in the file twice.")
        keys[name] = key
    if not keys:
        raise ConfigError(f"--api-keys {path}: the file has no key. Add a line, or no flag.")
    return KeySet(tuple(keys.values()), open_to_all)


def warn_if_readable(path: str) -> None:
    """Log a warning where other users of this host may read a file of secrets."""
    if os.stat(path).st_mode & stat.S_IROTH:
        logger.warning(
            "%s may be read by every user of this host. Restrict it (chmod 600), or write "
            "digests of the keys into it (sha256:...).",
            path,
        )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _digest(word: str, where: str) -> bytes:
    if word.startswith(_DIGEST):
        digits = word[len(_DIGEST) :]
        try:
            digest = bytes.fromhex(digits)
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise ConfigError(f"{where}: {_DIGEST} needs 64 hexadecimal digits after it.")
        return digest
    if len(word) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{where}: a key of {len(word)} characters can be guessed; {MIN_KEY_LENGTH} is the "
            "least. Make one with `openssl rand -hex 32`."
        )
    return hashlib.sha256(word.encode()).digest()


def _credentials(authorization: str) -> tuple[bytes, str | None]:
    """The key that a header shows, and the name beside it if there is one."""
    scheme, _, rest = authorization.strip().partition(" ")
    shown = rest.strip().encode("utf-8", "surrogateescape")[:_MAX_SHOWN]
    if scheme.lower() == "bearer":
        return shown, None
    if scheme.lower() == "basic":
        try:
            name, _, key = base64.b64decode(shown, validate=True).partition(b":")
        except binascii.Error:
            return b"", None
        return key, name.decode("utf-8", "replace")
    return b"", None
