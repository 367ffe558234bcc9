"""Loads and unloads models while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.inference.admission import STOPPING
from trimaran.server.inference.registry import (
    UNLOADED,
    ModelRegistry,
    StateOfVersion,
    VersionState,
)
from trimaran.server.loading.group_requests import LeavingGroups, SavedModel, SavedState
from trimaran.server.loading.model_set import Candidate, ExclusiveNames, LoadedModel, ModelSet
from trimaran.server.loading.preparation import (
    BackgroundTasks,
    LoadCancelledError,
    ModelPreparation,
    all_idle,
    is_expected,
    load_error,
    log_lost,
)
from trimaran.server.loading.reader import LoadError, ModelReader, ReadModel
from trimaran.server.loading.token_groups import OpenedGroups, TokenGroups
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import COMPOSED, ModelFactory
from trimaran.server.protocol.load_request import LoadRequest, OverrideFolders
from trimaran.server.python_models.model import close_model
from trimaran.server.repository.model_repository import Role

logger = logging.getLogger(__name__)


class ModelControl:
    """Adds models to the registry and removes models from the registry. Used on the event loop
    only.

    A reloaded model serves until its successor is ready; running requests end at the old
    version. If the successor needs the devices of the old worker groups, the old model first
    stops admitting requests and ends its groups.
    """

    def __init__(
        self,
        reader: ModelReader,
        overrides: OverrideFolders,
        groups: TokenGroups,
        factory: ModelFactory,
        metrics: Metrics,
        registry: ModelRegistry,
        save_state: Callable[[Sequence[str], bytes], None],
    ) -> None:
        self._reader = reader
        self._overrides = overrides
        self._groups = groups
        self._metrics = metrics
        self._registry = registry
        self._save_state = save_state
        self._set = ModelSet(factory, metrics, registry)
        self._busy = ExclusiveNames()
        self._background = BackgroundTasks()
        self._vacated: dict[str, ReadModel] = {}
        """Models of the previous front end that are still to be restored."""

        self._num_unloads: Counter[str] = Counter()
        """How often each model was unloaded while another task worked on it."""

        self._cut_off: set[str] = set()
        """Models whose first load was cut off by the end of the previous front end."""

        self._preparation = ModelPreparation(
            self._set, groups, factory, self._background, self.save_state
        )

    # ---- requests of clients ------------------------------------------------------------

    async def load(self, *requests: LoadRequest) -> None:
        """Load models and their missing steps; returns once they serve.

        A loaded model with unchanged files stays as it is. The load continues when the caller
        is cancelled.

        Raises:
            LoadError: a model was not loaded.
            RequestError: `close` was called first.
        """
        task = self._background.spawn(self._load(requests))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise RequestError(STOPPING, ErrorKind.UNAVAILABLE) from None
            raise
        except LoadError as error:
            logger.error("%s", error)
            raise

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Stop serving a model, the models that run it and, on request, its steps.

        Returns at once: running requests finish, then the worker groups end. A load in progress
        is cancelled. An unknown name is ignored.

        Raises:
            RequestError: the model's worker groups cannot end by themselves.
        """
        names = self._with_steps(name) if unload_dependents else {name}
        for loaded in filter(None, map(self._set.get, names)):
            reason = self._groups.why_lasting(loaded.candidate.groups)
            if reason:
                text = f"failed to unload '{loaded.candidate.name}', {reason}"
                raise RequestError(text, ErrorKind.UNSUPPORTED)
        self._preparation.cancel(names)
        free = {each for each in names if self._busy.are_free([each])}
        if free:
            self._withdraw(free)
        # One lock at a time: a later load of a name waits for this unload.
        for each in names - free:
            self._num_unloads[each] += 1
            self._background.spawn(self._unload_later(each))

    def names(self) -> list[str]:
        """The models that could be loaded.

        Raises:
            RequestError: the repository cannot be read.
        """
        try:
            return self._reader.names()
        except ConfigError as error:
            raise RequestError(str(error), ErrorKind.INTERNAL) from error

    def fingerprints(self) -> dict[str, str]:
        """The file fingerprint of each model that serves or waits for its restoration; empty
        for a model with an interrupted load.
        """
        known = [m.candidate for m in self._set.loaded()] + self._set.waiting()
        found = dict.fromkeys(self._cut_off, "")
        found |= {candidate.name: candidate.fingerprint for candidate in known}
        return found | {name: read.fingerprint for name, read in self._vacated.items()}

    async def close(self) -> None:
        """Cancel the loads under way. Idempotent."""
        await self._background.cancel()

    async def end_models(self) -> None:
        """End the processes and groups of served models, once no request runs."""
        await asyncio.gather(*(close_model(m.candidate.plain) for m in self._set.loaded()))

    def adopt(self, opened: Mapping[str, OpenedGroups]) -> None:
        """Let the first load of these models use groups that are already started."""
        self._preparation.adopt(opened)

    # ---- load ---------------------------------------------------------------------------

    async def _load(self, requests: Sequence[LoadRequest]) -> None:
        names = {request.name for request in requests}
        num_unloads = {name: self._num_unloads[name] for name in names}
        while True:
            async with self._busy.hold(names):
                loaded = {model.candidate.name for model in self._set.loaded()}
                read = await asyncio.to_thread(self._reader.read, requests, loaded.__contains__)
                for name, number in num_unloads.items():
                    if self._num_unloads[name] > number:
                        self._reader.discard(read)
                        raise LoadCancelledError(name)
                if read.keys() <= names:
                    return await self.load_read(read)
                # The steps are locked too, then everything is read again.
                self._reader.discard(read)
            names |= read.keys()

    async def load_read(
        self, read: Mapping[str, ReadModel], *, all_or_none: bool = False
    ) -> None:
        """Load models that were already read; returns once they serve.

        With ``all_or_none`` the first failure cancels the other loads, and no model is served.

        Raises:
            LoadError: a model was not loaded.
        """
        changed = [each for name, each in read.items() if self._is_changed(name, each)]
        for each in changed:
            if self._set.get(each.source.name) is None:
                self._set_state(each, VersionState.LOADING)
        if not all_or_none:
            self.save_state()
        started_s = time.monotonic()
        candidates, failures = await self._preparation.prepare(changed, all_or_none=all_or_none)
        for name, failure in failures.items():
            if self._preparation.is_vacated(name) and not isinstance(
                failure, LoadCancelledError
            ):
                await self._reopen(name)
        if not (failures and all_or_none):
            for name, error in self._install(candidates, started_s).items():
                failures[name] = _of_steps(read[name], failures) or error
        for each in changed:
            if each.source.name in failures:
                self._note_failure(each, failures[each.source.name])
        if failures and not all_or_none:
            self.save_state()
        for name, failure in failures.items():
            raise load_error(name, failure)

    async def restore(
        self,
        read: Mapping[str, ReadModel],
        opened: Mapping[str, OpenedGroups],
        leaving: Iterable[OpenedGroups],
        states: Iterable[StateOfVersion],
    ) -> None:
        """Serve the models of the previous front end, whether or not their engines are up.
        Vacated models are restored in the background. ``leaving`` groups end once other front
        ends have finished their requests. ``states`` are those of versions that were not ready.
        """
        self._take_states(read.keys(), states)
        candidates, going = [], list(leaving)
        for name, each in read.items():
            if each.source.role is Role.TOKEN and name not in opened:
                self._vacated[name] = each
                continue
            try:
                candidates.append(await self._preparation.restored(each, opened.get(name)))
            # A failure of one model must not stop the other models.
            except Exception as error:
                logger.error("Model '%s' is not served any more: %s", name, error)
                self._note_failure(each, error)
                if name in opened:
                    going.append(opened[name])
        # After the models are known: every end of a group writes the saved state again.
        ends = [self._preparation.end(gone.engines) for gone in going]
        self._set.await_steps(c for c in candidates if c.source.role in COMPOSED)
        singles = [c for c in candidates if c.source.role not in COMPOSED]
        self._install(singles, time.monotonic())
        # Versions that were unloaded or being loaded when the previous front end ended.
        kept = {each.source.folder for each in read.values()}
        left = [each for each in self._overrides.folders() if each not in kept]
        if left:
            self._background.spawn(self._remove_folders(left, ends))
        if self._vacated:
            self._background.spawn(self._bring_back())

    def _take_states(self, names: Collection[str], states: Iterable[StateOfVersion]) -> None:
        """Restore the states of models other than ``names``."""
        for each in states:
            if each.state is not VersionState.LOADING:
                is_failure = each.state is VersionState.UNAVAILABLE
                reason = each.reason if is_failure else UNLOADED
                unavailable = VersionState.UNAVAILABLE
                self._registry.set_state(each.name, each.version, unavailable, reason)
            elif each.name not in names:
                self._cut_off.add(each.name)

    async def _remove_folders(
        self, folders: Sequence[Path], ends: Sequence[asyncio.Task[None]]
    ) -> None:
        """Delete request files once groups have ended: a group may be restarted from them until
        then.
        """
        await asyncio.gather(*ends)
        for folder in folders:
            self._overrides.remove(folder)

    async def _bring_back(self) -> None:
        """Load the models that had no groups when the previous front end ended. Their devices
        may be free only once other front ends have finished their requests.
        """
        users = self._set.awaiting(self._vacated)
        for each in users:
            self._registry.set_state(each.name, each.version, VersionState.LOADING)
        for read in self._vacated.values():
            self._set_state(read, VersionState.LOADING)
        async with self._busy.hold(self._vacated):
            vacated, started_s = list(self._vacated.values()), time.monotonic()
            candidates, failures = await self._preparation.prepare(vacated)
            counted = {*self._vacated, *(each.name for each in users)}
            self._vacated.clear()
            self._install(candidates, started_s, counted)
            for read in vacated:
                name = read.source.name
                if name in failures:
                    logger.error("Model '%s' is not served any more: %s", name, failures[name])
                    self._note_failure(read, failures[name])
        is_lost = any(not isinstance(each, LoadCancelledError) for each in failures.values())
        waiting = {each.name for each in self._set.waiting()}
        for each in users:
            if self._registry.state(each.name, each.version) is VersionState.LOADING:
                # An unloaded model, or a step of one, does not make the server unready.
                is_wanted = is_lost and each.name in waiting
                reason = "a step of it is not served any more" if is_wanted else UNLOADED
                unavailable = VersionState.UNAVAILABLE
                self._registry.set_state(each.name, each.version, unavailable, reason)

    async def _reopen(self, name: str) -> None:
        """Restore the old generation of a model: its successor took its devices and failed."""
        logger.error("Model '%s': going back to what was loaded before", name)
        try:
            again = await self._preparation.reopened(name)
        except Exception as error:
            log_lost(name, error)
            self._retire(self._set.withdraw([name], explicitly=()))
            return
        self._install([again], time.monotonic())

    def _install(
        self,
        candidates: Sequence[Candidate],
        started_s: float,
        counted: Collection[str] = (),
    ) -> dict[str, Exception]:
        """Serve candidates; returns those that do not fit the loaded models, with the reasons.

        Replaced models end when their requests have ended. ``started_s`` is the monotonic time
        at which the load began; ``counted`` as for `ModelSet.commit`.
        """
        waited = self._set.waiting()
        outcome = self._set.commit(candidates, counted)
        self._remove_files(waited)
        elapsed_s = time.monotonic() - started_s
        for candidate in candidates:
            if candidate.name not in outcome.failures:
                for version in candidate.versions:
                    self._metrics.set_load_duration(candidate.name, version, elapsed_s)
                logger.info(
                    "Model '%s' version %s is loaded (%.1f s)",
                    candidate.name, ", ".join(candidate.versions), elapsed_s,
                )  # fmt: skip
        self._retire(outcome.replaced)
        self.save_state()
        return outcome.failures

    def _is_changed(self, name: str, read: ReadModel) -> bool:
        loaded = self._set.get(name)
        if loaded is None or not read.fingerprint:
            return True
        return loaded.candidate.fingerprint != read.fingerprint

    def _set_state(self, read: ReadModel, state: VersionState, reason: str = "") -> None:
        for version in read.source.versions:
            self._registry.set_state(read.source.name, str(version), state, reason)

    def _note_failure(self, read: ReadModel, failure: BaseException) -> None:
        name = read.source.name
        error = load_error(name, failure)
        if not is_expected(failure):
            logger.error("%s", error, exc_info=failure)
        if not read.fingerprint:
            self._overrides.remove(read.source.folder)
        if self._set.get(name) is None:
            self._set_state(read, VersionState.UNAVAILABLE, error.reason)

    # ---- unload -------------------------------------------------------------------------

    def _with_steps(self, name: str) -> set[str]:
        """A model and all models that the model runs."""
        names, unseen = set(), [name]
        while unseen:
            each = unseen.pop()
            if each not in names:
                names.add(each)
                unseen += self._set.steps(each) | self._preparation.steps(each)
        return names

    async def _unload_later(self, name: str) -> None:
        async with self._busy.hold([name]):
            self._withdraw({name})

    def _withdraw(self, names: set[str]) -> None:
        waited = self._set.waiting()
        going = self._set.withdraw(names, explicitly=names)
        self._remove_files(waited)
        for loaded in going:
            logger.info("Model '%s' is being unloaded", loaded.candidate.name)
        for name in names:
            self._registry.set_unloaded(name)
        self._retire(going)
        self.save_state()

    def _retire(self, models: Sequence[LoadedModel]) -> None:
        """Wait for the requests of these models, then end their processes and groups."""
        if not models:
            return
        task = self._background.spawn(self._end(models))
        for model in models:
            if model.candidate.engines is not None:
                self._preparation.note_leaving(model.candidate.engines, task)

    async def _end(self, models: Sequence[LoadedModel]) -> None:
        await all_idle(models)
        await asyncio.gather(*(self._end_one(loaded.candidate) for loaded in models))

    async def _end_one(self, candidate: Candidate) -> None:
        await self._groups.close(candidate.engines, candidate.groups)
        await close_model(candidate.plain)
        if candidate.groups:
            self._preparation.ended(candidate.groups)
        self._remove_files([candidate])
        name, current = candidate.name, self._set.get(candidate.name)
        for version in candidate.versions:
            if self._registry.state(name, version) is VersionState.UNLOADING:
                self._registry.set_state(name, version, VersionState.UNAVAILABLE, UNLOADED)
            if current is None or version not in current.candidate.versions:
                self._metrics.forget(name, version)

    def _remove_files(self, candidates: Iterable[Candidate]) -> None:
        """Delete the request files of models that neither serve nor are to be restored."""
        for candidate in candidates:
            if not self._set.is_kept(candidate):
                self._overrides.remove(candidate.source.folder)

    # ---- memory -------------------------------------------------------------------------

    def save_state(self) -> None:
        """Save the loaded models for the next front end."""
        models = [_saved(loaded.candidate, True) for loaded in self._set.loaded()]
        # A restored model keeps its counts, so other front ends do not count it anew.
        coming = {each.name for each in self._set.awaiting(self._vacated)}
        models += [_saved(c, c.name in coming) for c in self._set.waiting()]
        models += [_saved(_of_read(read), True) for read in self._vacated.values()]
        leaving = [_leaving(engines) for engines in self._preparation.leaving()]
        state = SavedState(
            models=tuple(models),
            leaving=tuple(leaving),
            generations=dict(self._groups.generations),
            states=tuple(self._registry.not_ready()),
        )
        groups = [group for model in models for group in model.groups]
        groups += [group for engines in leaving for group in engines.groups]
        self._save_state(groups, state.to_bytes())


def _saved(candidate: Candidate, is_loaded: bool) -> SavedModel:
    return SavedModel(
        name=candidate.name,
        version=candidate.version,
        folder=str(candidate.source.folder),
        # A fixed order of the maps: other front ends compare this state with a successor's.
        config=candidate.source.config.SerializeToString(deterministic=True),
        fingerprint=candidate.fingerprint,
        groups=candidate.groups,
        generation=candidate.generation,
        is_loaded=is_loaded,
        load_id=candidate.load_id,
    )


def _of_read(read: ReadModel) -> Candidate:
    """A model without groups."""
    return Candidate(
        source=read.source,
        labels=read.labels,
        fingerprint=read.fingerprint,
        load_id=read.load_id,
    )


def _leaving(engines: ModelEngines) -> LeavingGroups:
    return LeavingGroups(
        model=engines.model,
        version=engines.version,
        generation=engines.generation,
        groups=tuple(engines.groups),
    )


def _of_steps(read: ReadModel, failures: Mapping[str, BaseException]) -> ConfigError | None:
    """Why a composed model cannot be made: the load of a step failed."""
    for step in read.source.steps:
        if step in failures:
            reason = load_error(step, failures[step]).reason
            return ConfigError(f"its step '{step}' was not loaded: {reason}")
    return None
