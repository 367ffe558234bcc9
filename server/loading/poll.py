"""Follows a repository's folder: what appears is loaded, what changes again, what goes not."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.loading.control import ModelControl
from trimaran.server.loading.reader import ModelReader
from trimaran.server.protocol.load_request import LoadRequest

logger = logging.getLogger(__name__)


class RepositoryPoll:
    """Looks at the repository once a period. A model that fails to load is tried again
    when its files change."""

    def __init__(self, reader: ModelReader, control: ModelControl, period_s: float) -> None:
        self._reader = reader
        self._control = control
        self._period_s = period_s
        self._seen: dict[str, str] = {}

    async def run(self) -> None:
        """Look until cancelled. Models that are loaded already count as seen."""
        look = self._look_first
        while True:
            try:
                await look()
                look = self._look
            except ConfigError as error:
                logger.error("the repository cannot be read: %s", error)
            await asyncio.sleep(self._period_s)

    async def _look_first(self) -> None:
        known = self._control.fingerprints()
        self._seen = await asyncio.to_thread(self._reader.fingerprints) | known

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._reader.fingerprints)
        gone = self._seen.keys() - found.keys()
        changed = [name for name, value in found.items() if self._seen.get(name) != value]
        self._seen = found
        for name in gone:
            self._unload(name)
        # Each by itself, so that one which fails keeps no other from being loaded.
        await asyncio.gather(*map(self._load, changed))

    def _unload(self, name: str) -> None:
        try:
            self._control.unload(name)
        except RequestError as error:
            logger.error("%s", error)

    async def _load(self, name: str) -> None:
        # What fails is in the log already, and what is given up ends with the server.
        with suppress(RequestError):
            await self._control.load(LoadRequest(name))
