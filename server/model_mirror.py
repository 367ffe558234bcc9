"""The models of a front end that serves what the first one says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from trimaran.server.engine_client import EngineClient
from trimaran.server.log_settings import LogSettings
from trimaran.server.metrics import Metrics
from trimaran.server.model_engines import ModelEngines
from trimaran.server.model_preparation import BackgroundTasks, all_idle, is_expected
from trimaran.server.model_repository import Role
from trimaran.server.model_set import Candidate, LoadedModel, ModelSet
from trimaran.server.model_startup import read_again
from trimaran.server.pipeline import COMPOSED, ModelFactory
from trimaran.server.python_models.choice import PythonModels
from trimaran.server.python_models.model import close_model, start_model
from trimaran.server.registry import ModelRegistry, VersionState
from trimaran.server.remembered import Remembered, RememberedModel
from trimaran.server.shared_state import SharedState
from trimaran.server.token_groups import TokenGroups

logger = logging.getLogger(__name__)

_RELEASE_POLL_S = 0.02


class ModelMirror:
    """Makes the registry what another front end says. Used on the event loop only.

    It starts and ends no worker groups: those that it is told of dial in here too. A model
    that is replaced finishes the requests that run on it.
    """

    def __init__(
        self,
        factory: ModelFactory,
        python: PythonModels,
        engines: EngineClient,
        groups: TokenGroups,
        metrics: Metrics,
        registry: ModelRegistry,
        log_settings: LogSettings,
    ) -> None:
        self._factory = factory
        self._python = python
        self._engines = engines
        self._groups = groups
        self._metrics = metrics
        self._registry = registry
        self._log_settings = log_settings
        self._set = ModelSet(factory, metrics, registry)
        self._served: dict[str, RememberedModel] = {}
        self._retiring = BackgroundTasks()

    async def apply(self, state: SharedState) -> bool:
        """Serve this; returns once it is so. False if a model cannot be served here just
        now: the same again may change that. One call at a time."""
        remembered = Remembered()
        if state.remembered:
            remembered = Remembered.from_bytes(state.remembered)
        wanted = {model.name: model for model in remembered.models if model.is_loaded}
        changed = [m for name, m in wanted.items() if self._served.get(name) != m]
        candidates, failures = await self._candidates(changed)
        gone = (self._served.keys() - wanted.keys()) | failures.keys()
        if gone:
            self._retire(self._set.withdraw(gone, explicitly=gone))
        for model in changed:
            if not model.groups:
                self._vacate(model.name)
        outcome = self._set.commit(candidates)
        self._retire(outcome.replaced)
        failures.update(outcome.failures)
        self._served = {n: m for n, m in wanted.items() if n not in failures}
        self._apply_states(state)
        for name, error in failures.items():
            logger.error("Model '%s' is not served here: %s", name, error)
            self._registry.set_loading(name, str(error))
        settings = self._log_settings.values()
        changes = {n: v for n, v in state.log_settings.items() if settings.get(n) != v}
        if changes:
            self._log_settings.update(changes)
        return not failures

    async def released(self, groups: Sequence[str]) -> None:
        """Return once nothing here runs on these groups, or ever will."""
        while any(self._engines.is_known(group) for group in groups):
            await asyncio.sleep(_RELEASE_POLL_S)

    async def close(self) -> None:
        """Give up what is under way, and end what the models started."""
        await self._retiring.cancel()
        await asyncio.gather(*(close_model(m.candidate.plain) for m in self._set.loaded()))

    # ---- models -------------------------------------------------------------------------

    async def _candidates(
        self, models: Sequence[RememberedModel]
    ) -> tuple[list[Candidate], dict[str, Exception]]:
        """What serves these models, and by name what keeps others from being served."""
        making = [asyncio.ensure_future(self._candidate(model)) for model in models]
        try:
            found = await asyncio.gather(*making, return_exceptions=True)
            for result in found:
                if isinstance(result, BaseException) and not is_expected(result):
                    raise result
        except BaseException:
            # The first front end is gone, say: its successor tells of all of them again.
            for result in await asyncio.gather(*making, return_exceptions=True):
                if isinstance(result, Candidate):
                    await _discard(result)
            raise
        failures = {
            m.name: r for m, r in zip(models, found, strict=True) if isinstance(r, Exception)
        }
        return [each for each in found if isinstance(each, Candidate)], failures

    async def _candidate(self, model: RememberedModel) -> Candidate | None:
        """What serves this model; None while it has no worker groups."""
        read = await asyncio.to_thread(read_again, model, self._python)
        plain, engines = None, None
        if read.source.role is Role.TOKEN:
            if not model.groups:
                return None
            opened = self._groups.adopt(read.source, model.generation, model.groups)
            engines = opened.engines
            try:
                plain = self._factory.single(read.source, engines)
                await self._groups.wait_known(opened)
            except BaseException:
                engines.let_go()
                raise
        elif read.source.role not in COMPOSED:
            plain = await asyncio.to_thread(self._factory.single, read.source)
            await start_model(plain)
        return Candidate(
            source=read.source,
            labels=read.labels,
            fingerprint=read.fingerprint,
            plain=plain,
            engines=engines,
            groups=model.groups,
            generation=model.generation,
        )

    def _apply_states(self, state: SharedState) -> None:
        told = {(each.name, each.version): each for each in state.states}
        for each in told.values():
            # Of a model that is loaded here nobody but this front end knows when it is over.
            if each.state is VersionState.LOADING or self._set.get(each.name) is None:
                self._registry.set_state(each.name, each.version, each.state, each.reason)
        for loaded in self._set.loaded():
            key = loaded.candidate.name, loaded.candidate.version
            is_ready = self._registry.state(*key) is VersionState.READY
            if key not in told and not is_ready:
                self._registry.set_state(*key, VersionState.READY)

    def _vacate(self, name: str) -> None:
        """Let go of a model's groups, if it has any: its successor needs their place. It
        admits nothing until that serves."""
        loaded = self._set.get(name)
        if loaded is not None and loaded.candidate.engines is not None:
            suspended = self._set.suspend(name)
            self._set.detach_engines(name)
            self._retiring.spawn(_let_finish(suspended, loaded.candidate.engines))

    def _retire(self, models: Sequence[LoadedModel]) -> None:
        if models:
            self._retiring.spawn(self._end(models))

    async def _end(self, models: Sequence[LoadedModel]) -> None:
        await all_idle(models)
        for loaded in models:
            candidate = loaded.candidate
            await close_model(candidate.plain)
            if candidate.engines is not None:
                candidate.engines.close()
            current = self._set.get(candidate.name)
            if current is None or current.candidate.version != candidate.version:
                self._metrics.forget(candidate.name, candidate.version)


async def _discard(candidate: Candidate) -> None:
    """End what was made for nothing, so that it can be made again."""
    if candidate.engines is not None:
        candidate.engines.let_go()
    await close_model(candidate.plain)


async def _let_finish(models: Sequence[LoadedModel], engines: ModelEngines) -> None:
    """Close engines once no request runs on these models."""
    await all_idle(models)
    engines.close()
