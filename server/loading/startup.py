"""Loads without a client's request: the models of the start, and a polled repository."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.config import FrontendConfig
from trimaran.server.inference.registry import StateOfVersion, VersionState
from trimaran.server.loading.control import ModelControl
from trimaran.server.loading.group_requests import SavedModel, SavedState
from trimaran.server.loading.preparation import load_error, log_lost
from trimaran.server.loading.reader import LoadError, ModelReader, ReadModel
from trimaran.server.loading.token_groups import OpenedGroups, TokenGroups
from trimaran.server.models.factory import read_labels
from trimaran.server.protocol.load_request import LoadRequest
from trimaran.server.repository.model_repository import PythonModels, Role, repository_model

logger = logging.getLogger(__name__)

ALL_MODELS = "*"


class ModelStartup:
    """Loads the first models in two steps, so that started groups may dial in between them."""

    def __init__(
        self,
        config: FrontendConfig,
        reader: ModelReader,
        control: ModelControl,
        groups: TokenGroups,
    ) -> None:
        self._config = config
        self._reader = reader
        self._control = control
        self._groups = groups
        self._read: dict[str, ReadModel] = {}
        self._opened: dict[str, OpenedGroups] = {}
        self._surplus: list[str] = []
        self._leaving: list[OpenedGroups] = []
        self._states: list[StateOfVersion] = []

    async def begin(self) -> None:
        """Read the models and make their groups known.

        Raises:
            ConfigError: a model cannot be served.
        """
        config = self._config
        if config.saved_state:
            self._read_saved_state(SavedState.from_bytes(config.saved_state))
            return
        try:
            self._read = await asyncio.to_thread(self._read_first)
        except LoadError as error:
            raise ConfigError(str(error.__cause__ or error)) from error
        for name, names in config.groups.items():
            read = self._read.get(name)
            if read is None:
                self._surplus += names
            else:
                self._opened[name] = self._groups.adopt(read.source, 1, names)

    async def finish(self) -> None:
        """Return once the models serve; models of a predecessor may still be down.

        Raises:
            ConfigError: a model cannot be served.
            LoadError: a worker group failed.
        """
        if self._config.saved_state:
            await self._control.restore(self._read, self._opened, self._leaving, self._states)
            return
        if self._surplus:
            await self._groups.close(None, self._surplus)
        self._control.adopt(self._opened)
        try:
            # A missing tokenizer is reported before weights are loaded.
            await self._control.load_read(self._read, all_or_none=True)
        except LoadError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None
            raise

    # ---- models of the configuration ------------------------------------------------------

    def _read_first(self) -> dict[str, ReadModel]:
        mode, chosen = self._config.model_control_mode, self._config.load_models
        names = self._reader.names()
        if mode == "explicit" and ALL_MODELS not in chosen:
            names = list(chosen)
        read = self._reader.read([LoadRequest(name) for name in names], lambda _: False)
        if mode == "explicit":
            return read
        for name in self._without_groups(read):
            logger.warning("Model '%s' is not served: no worker group was started for it", name)
            del read[name]
        return read

    def _without_groups(self, read: dict[str, ReadModel]) -> set[str]:
        """Token-level models without worker groups, and the models that run them."""
        sources = {name: each.source for name, each in read.items()}
        found = {
            name
            for name, source in sources.items()
            if source.role is Role.TOKEN and name not in self._config.groups
        }
        while more := {n for n, s in sources.items() if found & set(s.steps)} - found:
            found |= more
        return found

    # ---- models of the predecessor ------------------------------------------------------

    def _read_saved_state(self, saved: SavedState) -> None:
        python = PythonModels.parse(self._config.python_models)
        self._groups.generations.update(saved.generations)
        self._states += saved.states
        for model in saved.models:
            try:
                read = read_again(model, python)
            # A failure of one model must not stop the other models.
            except Exception as error:
                log_lost(model.name, error)
                lost, reason = VersionState.UNAVAILABLE, load_error(model.name, error).reason
                self._states.append(StateOfVersion(model.name, model.version, lost, reason))
                self._leave(model.name, model.version, model.generation, model.groups)
                continue
            self._read[model.name] = read
            if model.groups:
                opened = self._groups.adopt(read.source, model.generation, model.groups)
                self._opened[model.name] = opened
        for each in saved.leaving:
            self._leave(each.model, each.version, each.generation, each.groups)

    def _leave(self, model: str, version: str, generation: int, groups: Sequence[str]) -> None:
        """Expect groups that end once other front ends have finished their requests."""
        if groups:
            self._leaving.append(self._groups.adopt_of(model, version, generation, groups))


def read_again(model: SavedModel, python: PythonModels) -> ReadModel:
    """Read a model that was loaded before.

    Raises:
        ConfigError: the files have changed.
    """
    config = ModelConfig.FromString(model.config)
    source = repository_model(Path(model.folder), config, python)
    return ReadModel(source, read_labels(source), model.fingerprint, model.load_id)


class RepositoryPoll:
    """Polls the repository. A failed model is tried again when its files change."""

    def __init__(self, reader: ModelReader, control: ModelControl, period_s: float) -> None:
        self._reader = reader
        self._control = control
        self._period_s = period_s
        self._seen: dict[str, str] = {}

    async def run(self) -> None:
        """Poll until cancelled. Models that are already loaded count as seen."""
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
        # Each model separately: a failed load must not stop the loads of other models.
        await asyncio.gather(*map(self._load, changed))

    def _unload(self, name: str) -> None:
        try:
            self._control.unload(name)
        except RequestError as error:
            logger.error("%s", error)

    async def _load(self, name: str) -> None:
        # Failures are in the log already; cancelled loads end with the server.
        with suppress(RequestError):
            await self._control.load(LoadRequest(name))
