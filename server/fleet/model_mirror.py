"""The models of a follower: the same that the first front end serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trimaran.server.engines.client import EngineClient
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.fleet.peer_link import SharedState
from trimaran.server.inference.registry import ModelRegistry, VersionState
from trimaran.server.loading.group_requests import SavedModel, SavedState
from trimaran.server.loading.model_set import Candidate, LoadedModel, ModelSet
from trimaran.server.loading.preparation import BackgroundTasks, all_idle, is_expected
from trimaran.server.loading.startup import read_again
from trimaran.server.loading.token_groups import TokenGroups
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import COMPOSED, ModelFactory
from trimaran.server.python_models.model import close_model, start_model
from trimaran.server.repository.model_repository import PythonModels, Role
from trimaran.server.settings import LogSettings

logger = logging.getLogger(__name__)

_RELEASE_POLL_S = 0.02


class ModelMirror:
    """Makes the registry follow the first front end. Used on the event loop only.

    The mirror starts and ends no worker groups: the groups of the first front end dial in here
    too. A replaced model finishes its running requests.
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
        self._state = SharedState()
        self._wanted: dict[str, SavedModel] = {}
        self._served: dict[str, SavedModel] = {}
        self._making: dict[str, asyncio.Task[Candidate | None]] = {}
        """The task or object that will serve each wanted model that is not served yet."""

        self._discarding: dict[str, asyncio.Task[None]] = {}
        self._superseded: asyncio.Future[None] | None = None
        self._unsettled: set[str] = set()
        self._has_settled = asyncio.Event()
        self._retiring = BackgroundTasks()

    def note(self, state: SharedState) -> None:
        """Apply the part of a state that needs no start: stop serving models that the state
        lacks, cancel their starts, and take over the settings.
        """
        before, self._state, self._wanted = self._wanted, state, _wanted(state)
        for name in list(self._making):
            if self._wanted.get(name) != before.get(name):
                self._cancel(name)
        self._withdraw(self._served.keys() - self._wanted.keys())
        for model in self._wanted.values():
            if not model.groups:
                self._vacate(model.name)
        self._apply_states(state)
        settings = self._log_settings.values()
        changes = {n: v for n, v in state.log_settings.items() if settings.get(n) != v}
        if changes:
            self._log_settings.update(changes)
        self._unsettled = {n for n, m in self._wanted.items() if self._served.get(n) != m}
        self._has_settled.set()
        if self._superseded is not None and not self._superseded.done():
            self._superseded.set_result(None)

    async def apply(self) -> bool:
        """Serve the models of the noted state, each model as soon as the model has started.
        Returns once all of them serve, or another state was noted; False if a model cannot be
        served now but possibly later. Only one call may run at a time.
        """
        state, has_failed = self._state, False
        self._superseded = asyncio.get_running_loop().create_future()
        for name, model in self._wanted.items():
            if self._served.get(name) != model and name not in self._making:
                self._making[name] = asyncio.ensure_future(self._candidate(model))
        while self._making and state is self._state:
            under_way = [each for each in self._making.values() if not each.done()]
            if under_way:
                ends: set[asyncio.Future[Any]] = {*under_way, self._superseded}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if state is self._state:
                has_failed |= self._serve(self._made())
        return not has_failed

    async def settled(self, name: str) -> None:
        """Return once a noted model is served, or cannot be served now."""
        while name in self._unsettled:
            self._has_settled.clear()
            await self._has_settled.wait()

    async def released(self, groups: Sequence[str]) -> None:
        """Return once no request runs on these groups here and no new request can arrive."""
        while any(self._engines.is_known(group) for group in groups):
            await asyncio.sleep(_RELEASE_POLL_S)

    async def close(self) -> None:
        """Cancel the starts under way, and end what the models started."""
        for name in list(self._making):
            self._cancel(name)
        await asyncio.gather(*self._discarding.values())
        await self._retiring.cancel()
        await asyncio.gather(*(close_model(m.candidate.plain) for m in self._set.loaded()))

    # ---- models -------------------------------------------------------------------------

    def _made(self) -> dict[str, Candidate | BaseException | None]:
        """For each wanted model that can be decided now, the `ServedModel` or the reason for
        the failure. The steps of a composed model are decided first.
        """
        found = {
            name: making.exception() or making.result()
            for name, making in self._making.items()
            if making.done()
        }
        waiting = self._making.keys() - found.keys()
        while True:
            users = {n for n, each in found.items() if waiting.intersection(_steps(each))}
            if users <= waiting:
                break
            waiting |= users
        made = {name: each for name, each in found.items() if name not in waiting}
        for name in made:
            del self._making[name]
        return made

    def _serve(self, made: Mapping[str, Candidate | BaseException | None]) -> bool:
        """Serve these from now on; whether some cannot be served."""
        candidates = [each for each in made.values() if isinstance(each, Candidate)]
        failures = {n: each for n, each in made.items() if isinstance(each, BaseException)}
        self._withdraw(failures.keys())
        outcome = self._set.commit(candidates)
        self._retire(outcome.replaced)
        failures.update(outcome.failures)
        for name in made.keys() | failures.keys():
            self._served.pop(name, None)
            if name not in failures:
                self._served[name] = self._wanted[name]
        self._apply_states(self._state)
        for name, error in failures.items():
            trace = None if is_expected(error) else error
            logger.error("Model '%s' is not served here: %s", name, error, exc_info=trace)
            self._registry.set_loading(name, str(error))
        self._unsettled -= made.keys()
        self._has_settled.set()
        return bool(failures)

    def _cancel(self, name: str) -> None:
        """Drop a prepared model; a later state may list the model again."""
        making = self._making.pop(name)
        making.cancel()
        before = self._discarding.get(name)
        discarding = asyncio.ensure_future(_discard(making, before))
        self._discarding[name] = discarding
        discarding.add_done_callback(lambda done: self._forget(name, done))

    def _forget(self, name: str, discarding: asyncio.Task[None]) -> None:
        if self._discarding.get(name) is discarding:
            del self._discarding[name]

    async def _candidate(self, model: SavedModel) -> Candidate | None:
        """The task or object that serves this model; None while the model has no worker
        groups.
        """
        if model.name in self._discarding:
            await asyncio.wait({self._discarding[model.name]})
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
            load_id=read.load_id,
            plain=plain,
            engines=engines,
            groups=model.groups,
            generation=model.generation,
        )

    def _apply_states(self, state: SharedState) -> None:
        told = {(each.name, each.version): each for each in state.states}
        for each in told.values():
            # The first front end is not told when this front end's load of the model ends.
            if each.state is VersionState.LOADING or self._set.get(each.name) is None:
                self._registry.set_state(each.name, each.version, each.state, each.reason)
        for known in self._registry.not_ready():
            is_told = (known.name, known.version) in told
            is_ours = known.name in self._wanted or self._set.get(known.name) is not None
            if not is_told and not is_ours:
                # For example, the load was cut off with the previous first front end.
                self._registry.forget(known.name, known.version)
        for loaded in self._set.loaded():
            for version in loaded.candidate.versions:
                key = loaded.candidate.name, version
                is_ready = self._registry.state(*key) is VersionState.READY
                if key not in told and not is_ready:
                    self._registry.set_state(*key, VersionState.READY)

    def _withdraw(self, names: Collection[str]) -> None:
        if names:
            for name in names:
                self._served.pop(name, None)
            self._retire(self._set.withdraw(names, explicitly=names))

    def _vacate(self, name: str) -> None:
        """Release a model's groups, if the model has any: the successor needs their devices.
        The model admits no requests until the successor serves.
        """
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
            for version in candidate.versions:
                if current is None or version not in current.candidate.versions:
                    self._metrics.forget(candidate.name, version)


def _wanted(state: SharedState) -> dict[str, SavedModel]:
    """The loaded models by name."""
    if not state.saved_state:
        return {}
    models = SavedState.from_bytes(state.saved_state).models
    return {model.name: model for model in models if model.is_loaded}


def _steps(made: Candidate | BaseException | None) -> tuple[str, ...]:
    return made.source.steps if isinstance(made, Candidate) else ()


async def _discard(
    making: asyncio.Task[Candidate | None], before: asyncio.Task[None] | None
) -> None:
    """Release what was made for a dropped model, so that the model can be made again.
    ``before`` is the task that ends the same model's earlier objects.
    """
    await asyncio.wait({making, before} if before is not None else {making})
    candidate = None if making.cancelled() or making.exception() else making.result()
    if candidate is None:
        return
    if candidate.engines is not None:
        candidate.engines.let_go()
    await close_model(candidate.plain)


async def _let_finish(models: Sequence[LoadedModel], engines: ModelEngines) -> None:
    """Close engines once no request runs on these models."""
    await all_idle(models)
    engines.close()
