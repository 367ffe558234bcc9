"""Certificates of a port: TLS contexts, checked at start and read again when files change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a port."""

    cert: str
    """The server's certificate, intermediate ones behind it."""

    key: str
    root_cert: str = ""
    """Certificates of the authorities whose clients are served; only with `is_mutual`."""

    is_mutual: bool = False
    """Whether each client must show a certificate."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are in use."""
        return (self.cert, self.key, *([self.root_cert] if self.is_mutual else []))


@dataclass(frozen=True, slots=True)
class TlsContent:
    """The content of the files of a port, which fits together."""

    cert: bytes
    key: bytes
    root_cert: bytes | None


class CurrentContext(ssl.SSLContext):
    """The context of a listener, which starts each connection with the latest context.

    No context changes once a connection uses it. Tickets and sessions are those of one context:
    a client whose authority is gone resumes nothing.
    """

    latest: ssl.SSLContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """The TLS side of a new connection."""
        return self.latest.wrap_bio(*args, **options)


class ServerTls:
    """The TLS of one port. New certificates and authorities count for connections from then on.

    `reload` may run in a thread while handshakes go on.
    """

    def __init__(self, files: TlsFiles, flags: str) -> None:
        """``flags`` is ``http`` or ``grpc``: whose flags named the files.

        Raises:
            ConfigError: a file cannot be read, or the files do not fit together.
        """
        self.files = files
        self._flags = flags
        self.context = CurrentContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.latest, self.content = self._read()

    def reload(self) -> None:
        """Read the files again; files that do not fit together change nothing."""
        try:
            self.context.latest, self.content = self._read()
        except ConfigError as error:
            logger.error("%s The former certificate stays.", error)
        else:
            logger.info("the certificate of --%s-server-cert was read again", self._flags)

    def _read(self) -> tuple[ssl.SSLContext, TlsContent]:
        content = _content(self.files, self._flags)
        context = make_context(self.files, self._flags)
        if _content(self.files, self._flags) != content:
            raise ConfigError(f"--{self._flags}-server-cert: the files change at this moment.")
        return context, content


def make_context(files: TlsFiles, flags: str) -> ssl.SSLContext:
    """A server's context of TLS 1.2 or later.

    Raises:
        ConfigError: a file cannot be read, or the files do not fit together.
    """
    for name, path in (("cert", files.cert), ("key", files.key)):
        _read(path, f"--{flags}-server-{name}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Over HTTP alone: gRPC has a TLS library of its own.
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With an empty password an encrypted key fails, where none would ask at the terminal.
        context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"--{flags}-server-cert {files.cert} with --{flags}-server-key {files.key}: "
            f"{_reason(error)}. Name a PEM certificate and its unencrypted PEM key."
        ) from None
    if files.is_mutual:
        flag = f"--{flags}-root-cert"
        _read(files.root_cert, flag)
        try:
            context.load_verify_locations(files.root_cert)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{flag} {files.root_cert}: {_reason(error)}. Name a PEM certificate."
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _content(files: TlsFiles, flags: str) -> TlsContent:
    root = _read(files.root_cert, f"--{flags}-root-cert") if files.is_mutual else None
    cert = _read(files.cert, f"--{flags}-server-cert")
    return TlsContent(cert, _read(files.key, f"--{flags}-server-key"), root)


def _read(path: str, flag: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}.") from None


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
