"""Loads and unloads models while the server runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trimaran.comm.errors import ConfigError, ErrorKind, RequestError
from trimaran.server.admission import STOPPING
from trimaran.server.exclusive import ExclusiveNames
from trimaran.server.group_requests import GroupsRefusedError
from trimaran.server.load_request import LoadRequest, OverrideFolders
from trimaran.server.metrics import Metrics
from trimaran.server.model_reader import LoadError, ModelReader, ReadModel
from trimaran.server.model_repository import Role
from trimaran.server.model_set import Candidate, LoadedModel, ModelSet
from trimaran.server.pipeline import COMPOSED, ModelFactory
from trimaran.server.registry import UNLOADED, ModelRegistry, VersionState
from trimaran.server.remembered import Remembered, RememberedModel
from trimaran.server.token_groups import OpenedGroups, TokenGroups

logger = logging.getLogger(__name__)


class ModelControl:
    """Brings models into the registry and out of it again. Used on the event loop only.

    A model that is loaded again serves until its successor is ready; requests that run on
    it end there. Only where the successor needs the very place of the model's worker
    groups does it wait for them: the model then admits nothing until one of the two
    serves.
    """

    def __init__(
        self,
        reader: ModelReader,
        overrides: OverrideFolders,
        groups: TokenGroups,
        factory: ModelFactory,
        metrics: Metrics,
        registry: ModelRegistry,
        remember: Callable[[Sequence[str], bytes], None],
    ) -> None:
        self._reader = reader
        self._overrides = overrides
        self._groups = groups
        self._factory = factory
        self._metrics = metrics
        self._registry = registry
        self._remember_at = remember
        self._set = ModelSet(factory, metrics, registry)
        self._busy = ExclusiveNames()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._adopted: dict[str, OpenedGroups] = {}

    # ---- what clients ask for -----------------------------------------------------------

    async def load(self, *requests: LoadRequest) -> None:
        """Load models and the steps that they lack; returns once they serve.

        A loaded model whose files have not changed is left alone. The load goes on when
        the caller is cancelled.

        Raises:
            LoadError: one of them was not loaded.
            RequestError: `close` came first.
        """
        task = self._spawn(self._load(requests))
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
        """Serve a model no more, nor those that run it, nor, on request, its steps.

        Returns at once: running requests finish, then its worker groups end. A name that
        is not loaded is none of our business.
        """
        names = self._with_steps(name) if unload_dependents else {name}
        if self._busy.are_free(names):
            self._withdraw(names)
        else:
            self._spawn(self._unload_later(names))

    def names(self) -> list[str]:
        """The models that could be loaded."""
        with suppress(ConfigError):
            return self._reader.names()
        return []

    def loaded(self) -> list[LoadedModel]:
        """The models that serve."""
        return self._set.loaded()

    async def close(self) -> None:
        """Give up what is under way. May be called twice."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def adopt(self, opened: Mapping[str, OpenedGroups]) -> None:
        """Have the first load of these models use groups that are started already."""
        self._adopted.update(opened)

    # ---- load ---------------------------------------------------------------------------

    async def _load(self, requests: Sequence[LoadRequest]) -> None:
        names = {request.name for request in requests}
        while True:
            async with self._busy.hold(names):
                loaded = {model.candidate.name for model in self._set.loaded()}
                read = await asyncio.to_thread(self._reader.read, requests, loaded.__contains__)
                if read.keys() <= names:
                    return await self.load_read(read)
            names |= read.keys()

    async def load_read(self, read: Mapping[str, ReadModel]) -> None:
        """Load these models, which somebody has read; returns once they serve.

        Raises:
            LoadError: one of them was not loaded.
        """
        changed = [each for name, each in read.items() if self._is_changed(name, each)]
        for each in changed:
            if self._set.get(each.source.name) is None:
                self._set_state(each, VersionState.LOADING)
        started_s = time.monotonic()
        found = await asyncio.gather(*map(self._prepare, changed), return_exceptions=True)
        failures: dict[str, BaseException] = {}
        candidates = []
        for each, result in zip(changed, found, strict=True):
            if isinstance(result, BaseException):
                failures[each.source.name] = result
            else:
                candidates.append(result)
        failures.update(self._install(candidates, started_s))
        for each in changed:
            failure = failures.get(each.source.name)
            if failure is not None:
                self._note_failure(each, failure)
        for failure in failures.values():
            raise _load_error(next(n for n, f in failures.items() if f is failure), failure)

    async def restore(
        self, read: Mapping[str, ReadModel], opened: Mapping[str, OpenedGroups]
    ) -> None:
        """Serve what a front end before this one had loaded, whether or not it is up."""
        candidates = []
        for name, each in read.items():
            try:
                candidates.append(await self._restored(each, opened.get(name)))
            except (RequestError, ConfigError) as error:
                logger.error("Model '%s' is not served any more: %s", name, error)
                self._note_failure(each, error)
        self._set.await_steps(c for c in candidates if c.source.role in COMPOSED)
        singles = [c for c in candidates if c.source.role not in COMPOSED]
        self._install(singles, time.monotonic())

    async def _restored(self, read: ReadModel, opened: OpenedGroups | None) -> Candidate:
        if opened is None:
            return await self._prepare(read)
        plain = self._factory.single(read.source, opened.engines)
        await self._groups.wait_known(opened)
        return _candidate(read, plain=plain, opened=opened)

    def _install(
        self, candidates: Sequence[Candidate], started_s: float
    ) -> dict[str, ConfigError]:
        """Serve these; those that do not fit together with what is loaded, with the reason.

        What they replace ends when its requests have. ``started_s`` is when their load
        began, on the monotonic clock.
        """
        outcome = self._set.commit(candidates)
        elapsed_s = time.monotonic() - started_s
        for candidate in candidates:
            if candidate.name not in outcome.failures:
                self._metrics.set_load_duration(candidate.name, candidate.version, elapsed_s)
                logger.info(
                    "Model '%s' version %s is loaded (%.1f s)",
                    candidate.name, candidate.version, elapsed_s,
                )  # fmt: skip
        self._retire(outcome.replaced)
        self.remember()
        return outcome.failures

    def _is_changed(self, name: str, read: ReadModel) -> bool:
        loaded = self._set.get(name)
        if loaded is None or not read.fingerprint:
            return True
        return loaded.candidate.fingerprint != read.fingerprint

    def _set_state(self, read: ReadModel, state: VersionState, reason: str = "") -> None:
        version = str(read.source.versions[-1])
        self._registry.set_state(read.source.name, version, state, reason)

    def _note_failure(self, read: ReadModel, failure: BaseException) -> None:
        name = read.source.name
        error = _load_error(name, failure)
        if not _is_expected(failure):
            logger.error("%s", error, exc_info=failure)
        if not read.fingerprint:
            self._overrides.remove(read.source.folder)
        if self._set.get(name) is None:
            self._set_state(read, VersionState.UNAVAILABLE, error.reason)

    # ---- the parts of a candidate -------------------------------------------------------

    async def _prepare(self, read: ReadModel) -> Candidate:
        """Everything that a model needs before it can serve.

        Raises:
            RequestError, ConfigError: it cannot; nothing of it is left.
        """
        if read.source.role is Role.TOKEN:
            return await self._prepare_token(read)
        plain = None
        if read.source.role not in COMPOSED:
            plain = await asyncio.to_thread(self._factory.single, read.source)
        return _candidate(read, plain=plain)

    async def _prepare_token(self, read: ReadModel) -> Candidate:
        name = read.source.name
        try:
            opened = await self._open(read)
            return await self._finish(read, opened)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) or not self._is_vacated(name):
                raise
            logger.error("model '%s': %s; going back to what was loaded before", name, error)
            await self._reopen(name)
            raise

    async def _finish(self, read: ReadModel, opened: OpenedGroups) -> Candidate:
        """A token-level model over its groups, once all of them are up.

        Raises:
            RequestError, ConfigError: it cannot serve; its groups are ended.
        """
        try:
            plain = self._factory.single(read.source, opened.engines)
            await self._groups.wait_up(opened)
        except BaseException:
            self._spawn(self._groups.close(opened.engines, opened.groups))
            raise
        return _candidate(read, plain=plain, opened=opened)

    async def _open(self, read: ReadModel) -> OpenedGroups:
        """Start the groups of a model: beside those that run, or else in their place.

        Raises:
            RequestError: there is no place for them.
        """
        name = read.source.name
        adopted = self._adopted.pop(name, None)
        if adopted is not None:
            return adopted
        while True:
            try:
                return await self._groups.open(read.source, self.remember)
            except GroupsRefusedError as error:
                leaving = {self._leaving[g] for g in error.conflicts if g in self._leaving}
                current = self._set.get(name)
                own = current.candidate.groups if current is not None else ()
                if leaving:
                    logger.info("model '%s' waits for the place of groups that end", name)
                    await asyncio.wait(leaving)
                elif error.conflicts and error.conflicts <= set(own):
                    await self._vacate(name)
                else:
                    raise

    async def _vacate(self, name: str) -> None:
        """End the groups of a loaded model, which admits nothing from now on."""
        logger.info("model '%s' ends its groups first: the new ones need their place", name)
        suspended = self._set.suspend(name)
        await _all_idle(suspended)
        candidate = suspended[-1].candidate
        self._set.detach_engines(name)
        # First, so that a front end after this one does not wait for them.
        self.remember()
        await self._groups.close(candidate.engines, candidate.groups)

    def _is_vacated(self, name: str) -> bool:
        current = self._set.get(name)
        return current is not None and not current.candidate.groups

    async def _reopen(self, name: str) -> None:
        """Serve again, on new groups, what was loaded before."""
        current = self._set.get(name)
        assert current is not None
        candidate = current.candidate
        read = ReadModel(candidate.source, dict(candidate.labels), candidate.fingerprint)
        try:
            opened = await self._groups.open(candidate.source, self.remember)
            again = await self._finish(read, opened)
        except (RequestError, ConfigError) as error:
            logger.error("model '%s' is not served any more: %s", name, error)
            self._retire(self._set.withdraw([name], explicitly=()))
            return
        self._install([again], time.monotonic())

    # ---- unload -------------------------------------------------------------------------

    def _with_steps(self, name: str) -> set[str]:
        """A model and all that it runs."""
        names, unseen = set(), [name]
        while unseen:
            each = unseen.pop()
            if each not in names:
                names.add(each)
                loaded = self._set.get(each)
                unseen += loaded.source.steps if loaded is not None else ()
        return names

    async def _unload_later(self, names: set[str]) -> None:
        async with self._busy.hold(names):
            self._withdraw(names)

    def _withdraw(self, names: set[str]) -> None:
        going = self._set.withdraw(names, explicitly=names)
        for loaded in going:
            logger.info("Model '%s' is being unloaded", loaded.candidate.name)
        for name in names:
            self._registry.set_unloaded(name)
        self._retire(going)
        self.remember()

    def _retire(self, models: Sequence[LoadedModel]) -> None:
        """Let the requests of these finish, then end what they held."""
        if not models:
            return
        task = self._spawn(self._end(models))
        groups = [group for model in models for group in model.candidate.groups]
        self._leaving.update(dict.fromkeys(groups, task))

    async def _end(self, models: Sequence[LoadedModel]) -> None:
        await _all_idle(models)
        await asyncio.gather(*(self._end_one(loaded.candidate) for loaded in models))

    async def _end_one(self, candidate: Candidate) -> None:
        await self._groups.close(candidate.engines, candidate.groups)
        for group in candidate.groups:
            self._leaving.pop(group, None)
        self._overrides.remove(candidate.source.folder)
        name, version = candidate.name, candidate.version
        if self._registry.state(name, version) is VersionState.UNLOADING:
            self._registry.set_state(name, version, VersionState.UNAVAILABLE, UNLOADED)
        current = self._set.get(name)
        if current is None or current.candidate.version != version:
            self._metrics.forget(name, version)

    # ---- memory -------------------------------------------------------------------------

    def remember(self) -> None:
        """Leave what is loaded to the front end after this one."""
        models = [_remembered(loaded.candidate, True) for loaded in self._set.loaded()]
        models += [_remembered(candidate, False) for candidate in self._set.waiting()]
        state = Remembered(models=tuple(models), generations=dict(self._groups.generations))
        groups = [group for model in models for group in model.groups]
        self._remember_at(groups, state.to_bytes())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _all_idle(models: Iterable[LoadedModel]) -> None:
    """Return when no request runs on these, of which users come before steps."""
    for loaded in models:
        await loaded.model.wait_idle()


def _candidate(
    read: ReadModel, *, plain: Any = None, opened: OpenedGroups | None = None
) -> Candidate:
    return Candidate(
        source=read.source,
        labels=read.labels,
        fingerprint=read.fingerprint,
        plain=plain,
        engines=opened.engines if opened is not None else None,
        groups=opened.groups if opened is not None else (),
        generation=opened.generation if opened is not None else 1,
    )


def _remembered(candidate: Candidate, is_loaded: bool) -> RememberedModel:
    return RememberedModel(
        name=candidate.name,
        folder=str(candidate.source.folder),
        config=candidate.source.config.SerializeToString(),
        fingerprint=candidate.fingerprint,
        groups=candidate.groups,
        generation=candidate.generation,
        is_loaded=is_loaded,
    )


def _is_expected(failure: BaseException) -> bool:
    return isinstance(failure, (RequestError, ConfigError))


def _load_error(name: str, failure: BaseException) -> LoadError:
    if isinstance(failure, LoadError):
        return failure
    text = str(failure) if _is_expected(failure) else f"{type(failure).__name__}: {failure}"
    error = LoadError(name, text)
    error.__cause__ = failure
    return error
