"""Turns read models into models that can serve, with tokenizers and worker groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.inference.request import Model
from trimaran.server.loading.group_requests import GroupsRefusedError
from trimaran.server.loading.model_set import Candidate, LoadedModel, ModelSet
from trimaran.server.loading.reader import LoadError, ReadModel
from trimaran.server.loading.token_groups import OpenedGroups, TokenGroups
from trimaran.server.models.factory import COMPOSED, ModelFactory
from trimaran.server.python_models.model import close_model, start_model
from trimaran.server.repository.model_repository import Role

logger = logging.getLogger(__name__)


class LoadCancelledError(LoadError):
    """The model was unloaded before it was loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "the model was unloaded while it was being loaded")


class BackgroundTasks:
    """Background tasks, which are cancelled together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ModelPreparation:
    """Prepares candidates for a set of models. Used on the event loop only.

    The groups of a token-level model start beside those of the loaded model. If the loaded
    model's own groups hold the needed devices, the loaded model is suspended, finishes its
    requests and ends its groups first: the model is then *vacated*.
    """

    def __init__(
        self,
        models: ModelSet,
        groups: TokenGroups,
        factory: ModelFactory,
        background: BackgroundTasks,
        save_state: Callable[[], None],
    ) -> None:
        self._set = models
        self._groups = groups
        self._factory = factory
        self._background = background
        self._save_state = save_state
        self._adopted: dict[str, OpenedGroups] = {}
        self._under_way: dict[str, tuple[ReadModel, asyncio.Future[Candidate]]] = {}
        self._cancelled: set[str] = set()
        """Candidates that are complete while other models of the same load are not."""

        self._leaving: dict[str, tuple[ModelEngines, asyncio.Task[None]]] = {}
        """Groups that are about to end, each with the task that ends it."""

    def adopt(self, opened: Mapping[str, OpenedGroups]) -> None:
        """Let the first candidates of these models use groups that are already started."""
        self._adopted.update(opened)

    def cancel(self, names: Iterable[str]) -> None:
        """Cancel the preparation of these models."""
        for name in self._under_way.keys() & set(names):
            _, task = self._under_way[name]
            if not task.cancel():
                self._cancelled.add(name)

    def steps(self, name: str) -> set[str]:
        """The steps of a model that is being prepared."""
        if name not in self._under_way:
            return set()
        read, _ = self._under_way[name]
        return set(read.source.steps)

    async def prepare(
        self, read: Sequence[ReadModel], *, all_or_none: bool = False
    ) -> tuple[list[Candidate], dict[str, BaseException]]:
        """Candidates of these models, and the failures by name.

        All resources of a failed model are released; the model may still be vacated. With
        ``all_or_none`` the first failure cancels the other preparations and is the first in the
        failures.
        """
        tasks = {each.source.name: asyncio.ensure_future(self._one(each)) for each in read}
        for each in read:
            self._under_way[each.source.name] = each, tasks[each.source.name]
        if all_or_none:
            try:
                await asyncio.gather(*tasks.values())
            except Exception:
                for task in tasks.values():
                    task.cancel()
        found = await asyncio.gather(*tasks.values(), return_exceptions=True)
        candidates: list[Candidate] = []
        failures: dict[str, BaseException] = {}
        for name, result in zip(tasks, found, strict=True):
            del self._under_way[name]
            is_cancelled = name in self._cancelled
            self._cancelled.discard(name)
            if isinstance(result, asyncio.CancelledError):
                failures[name] = LoadCancelledError(name)
            elif isinstance(result, BaseException):
                failures[name] = result
            elif is_cancelled:
                failures[name] = LoadCancelledError(name)
                self._discard(result)
            else:
                candidates.append(result)
        if all_or_none:
            by_cause = sorted(
                failures.items(), key=lambda f: isinstance(f[1], LoadCancelledError)
            )
            failures = dict(by_cause)
        return candidates, failures

    async def restored(self, read: ReadModel, opened: OpenedGroups | None) -> Candidate:
        """A candidate whose engines may be down; ``opened`` if it has groups.

        Raises:
            RequestError, ConfigError: the candidate cannot be made.
        """
        if opened is None:
            return await self._one(read)
        plain = self._factory.single(read.source, opened.engines)
        await self._groups.wait_known(opened)
        return _candidate(read, plain=plain, opened=opened)

    async def reopened(self, name: str) -> Candidate:
        """A vacated model with new groups.

        Raises:
            RequestError, ConfigError: the groups do not become ready.
        """
        current = self._set.get(name)
        assert current is not None
        candidate = current.candidate
        labels = dict(candidate.labels)
        read = ReadModel(candidate.source, labels, candidate.fingerprint, candidate.load_id)
        return await self._over(read, await self._open(read))

    def leaving(self) -> list[ModelEngines]:
        """The generations that are about to end."""
        return list({id(engines): engines for engines, _ in self._leaving.values()}.values())

    def note_leaving(self, engines: ModelEngines, task: asyncio.Task[None]) -> None:
        """Make loads that need these engines' devices wait for the task that ends the
        engines.
        """
        self._leaving.update(dict.fromkeys(engines.groups, (engines, task)))

    def ended(self, groups: Iterable[str]) -> None:
        """These engines have ended: no load waits for them, and the next front end ignores
        them.
        """
        for group in groups:
            self._leaving.pop(group, None)
        self._save_state()

    def is_vacated(self, name: str) -> bool:
        """Whether a loaded model has given up its groups."""
        current = self._set.get(name)
        if current is None or current.source.role is not Role.TOKEN:
            return False
        return not current.candidate.groups

    async def _one(self, read: ReadModel) -> Candidate:
        if read.source.role is Role.TOKEN:
            adopted = self._adopted.pop(read.source.name, None)
            if adopted is not None:
                # A failure here fails the start of the server, and the groups end with the
                # server.
                return await self._served_by(read, adopted)
            return await self._over(read, await self._open(read))
        plain = None
        if read.source.role not in COMPOSED:
            plain = await asyncio.to_thread(self._factory.single, read.source)
            await start_model(plain)
        return _candidate(read, plain=plain)

    async def _over(self, read: ReadModel, opened: OpenedGroups) -> Candidate:
        """A token-level model with its groups, which end if they do not become ready."""
        try:
            return await self._served_by(read, opened)
        except BaseException:
            self.end(opened.engines)
            raise

    def end(self, engines: ModelEngines) -> asyncio.Task[None]:
        """End groups that are unused here, after every other front end has released the groups.
        Loads that need their devices wait.
        """
        task = self._background.spawn(self._end(engines))
        self.note_leaving(engines, task)
        return task

    def _discard(self, candidate: Candidate) -> None:
        """Release what was made for a failed load."""
        if candidate.engines is not None:
            self.end(candidate.engines)
        self._background.spawn(close_model(candidate.plain))

    async def _end(self, engines: ModelEngines) -> None:
        groups = tuple(engines.groups)
        await self._groups.close(engines, groups)
        self.ended(groups)

    async def _served_by(self, read: ReadModel, opened: OpenedGroups) -> Candidate:
        """A token-level model with its groups, once all groups are up."""
        plain = self._factory.single(read.source, opened.engines)
        await self._groups.wait_up(opened)
        return _candidate(read, plain=plain, opened=opened)

    async def _open(self, read: ReadModel) -> OpenedGroups:
        """Start the groups of a model, beside the running groups or in their place."""
        name = read.source.name
        while True:
            # The group in the way may have ended by the time that the refusal is read.
            known = self._leaving.copy()
            try:
                return await self._groups.open(read.source, self._save_state)
            except GroupsRefusedError as error:
                known.update(self._leaving)
                leaving = {known[group][1] for group in error.conflicts if group in known}
                if leaving:
                    logger.info("model '%s' waits for devices of groups that are ending", name)
                    await asyncio.wait(leaving)
                elif self._are_own(name, error.conflicts):
                    await self._vacate(name)
                else:
                    raise

    def _are_own(self, name: str, groups: Collection[str]) -> bool:
        current = self._set.get(name)
        return current is not None and 0 < len(set(groups)) == len(
            set(groups) & set(current.candidate.groups)
        )

    async def _vacate(self, name: str) -> None:
        """End the groups of a loaded model, which admits no requests from now on."""
        logger.info("model '%s' ends its groups first: the new groups need their devices", name)
        suspended = self._set.suspend(name)
        await all_idle(suspended)
        engines = suspended[-1].candidate.engines
        assert engines is not None
        self._set.detach_engines(name)
        ending = self.end(engines)
        # Saved without groups: the next front end does not wait for them.
        self._save_state()
        # The groups end even if the load is cancelled meanwhile.
        await asyncio.shield(ending)


async def all_idle(models: Iterable[LoadedModel]) -> None:
    """Return when no request runs on these models, in which users come before steps."""
    for loaded in models:
        await loaded.wait_idle()


def is_expected(failure: BaseException) -> bool:
    """Whether an operator or a client can correct the cause; otherwise the failure is a bug."""
    return isinstance(failure, (RequestError, ConfigError))


def log_lost(name: str, failure: BaseException) -> None:
    """Log that a model is no longer served."""
    trace = None if is_expected(failure) else failure
    logger.error("Model '%s' is not served any more: %s", name, failure, exc_info=trace)


def load_error(name: str, failure: BaseException) -> LoadError:
    """A failure as reported to the client of the load."""
    if isinstance(failure, LoadError):
        return failure
    text = str(failure) if is_expected(failure) else f"{type(failure).__name__}: {failure}"
    error = LoadError(name, text)
    error.__cause__ = failure
    return error


def _candidate(
    read: ReadModel, *, plain: Model | None = None, opened: OpenedGroups | None = None
) -> Candidate:
    return Candidate(
        source=read.source,
        labels=read.labels,
        fingerprint=read.fingerprint,
        load_id=read.load_id,
        plain=plain,
        engines=opened.engines if opened is not None else None,
        groups=opened.groups if opened is not None else (),
        generation=opened.generation if opened is not None else 1,
    )
