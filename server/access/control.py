"""The access control of one front end: a guard for each port, and files that are followed."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from trimaran.server.access.api_keys import KeyFile
from trimaran.server.access.config import AccessConfig
from trimaran.server.access.policy import AccessPolicy
from trimaran.server.access.restrictions import ADMIN_CATEGORIES, SERVING_ONLY
from trimaran.server.access.tls import ServerTls, TlsFiles

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PortGuard:
    """What one port asks of requests and how it is encrypted."""

    policy: AccessPolicy = field(default_factory=AccessPolicy)
    tls: ServerTls | None = None
    flag: str = ""
    """The flag that chose the port; empty for the protocol's own."""


class AccessControl:
    """Guards of all ports. Keys and certificates are read again when their files change."""

    def __init__(self, config: AccessConfig) -> None:
        """Raises:
        ConfigError: a file cannot be read or does not hold what it should.
        """
        self._config = config
        self._followed: list[_Followed] = []
        self._keys: KeyFile | None = None
        if config.api_keys:
            self._keys = self._follow((config.api_keys,), lambda: KeyFile(config.api_keys))
        self._http_tls = self._tls(config.http_tls, "http")
        self._grpc_tls = self._tls(config.grpc_tls, "grpc")
        self._task: asyncio.Task[None] | None = None

    def http(self, *, is_admin: bool = False) -> PortGuard:
        """The guard of the HTTP port, or of the administration's."""
        policy = AccessPolicy(self._config.http_restrictions, self._keys, self._moved(is_admin))
        return PortGuard(policy, self._http_tls, "--admin-port" if is_admin else "--http-port")

    def openai(self) -> PortGuard:
        """The guard of the OpenAI port, whose certificates are those of HTTP."""
        policy = AccessPolicy(self._config.openai_restrictions, self._keys, self._moved(False))
        return PortGuard(policy, self._http_tls, "--openai-port")

    def grpc(self, *, is_admin: bool = False) -> PortGuard:
        """The guard of the gRPC port, or of the administration's."""
        policy = AccessPolicy(
            self._config.grpc_restrictions, self._keys, self._moved(is_admin), "protocol"
        )
        flag = "--admin-grpc-port" if is_admin else "--grpc-port"
        return PortGuard(policy, self._grpc_tls, flag)

    def start(self) -> None:
        """Follow the files, if there are any."""
        if self._followed:
            self._task = asyncio.ensure_future(_follow(self._followed))

    async def stop(self) -> None:
        """Follow the files no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _tls(self, files: TlsFiles | None, flags: str) -> ServerTls | None:
        if files is None:
            return None
        return self._follow(files.paths, lambda: ServerTls(files, flags))

    def _follow(self, paths: tuple[str, ...], read: Callable[[], _Source]) -> _Source:
        # Before the first reading: no change after that is missed.
        signature = _signature(paths)
        source = read()
        self._followed.append(_Followed(paths, source.reload, signature))
        return source

    def _moved(self, is_admin: bool) -> dict[str, str]:
        config = self._config
        if is_admin:
            text = "the administration port does not serve {}: use the serving ports"
            return {name: text.format(name) for name in SERVING_ONLY}
        if not config.has_admin:
            return {}
        ports = {"--admin-port": config.admin_port, "--admin-grpc-port": config.admin_grpc_port}
        where = " or ".join(
            f"{flag} {port}" for flag, port in ports.items() if port is not None
        )
        text = "{} requests are served on the administration port ({}), not on this one"
        return {name: text.format(name, where) for name in ADMIN_CATEGORIES}


Signature = tuple[tuple[int, int, int] | None, ...]


class _Reloadable(Protocol):
    def reload(self) -> None: ...


_Source = TypeVar("_Source", bound=_Reloadable)


@dataclass(slots=True)
class _Followed:
    """Files, what reads them again, and what they were like at the last reading."""

    paths: tuple[str, ...]
    reload: Callable[[], None]
    signature: Signature


async def _follow(followed: list[_Followed]) -> None:
    """Read files again after each change. They may lie on a slow file system: looks and reads
    are made in a thread."""
    while True:
        await asyncio.sleep(_POLL_INTERVAL_S)
        for each in followed:
            found = await asyncio.to_thread(_signature, each.paths)
            if found != each.signature:
                each.signature = found
                await asyncio.to_thread(each.reload)


def _signature(paths: Iterable[str]) -> Signature:
    return tuple(_of_file(path) for path in paths)


def _of_file(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
