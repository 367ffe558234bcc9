"""Makes what is read into models that can serve: with tokenizers, with worker groups."""

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


class GivenUpError(LoadError):
    """The model was unloaded before it was loaded."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "it was unloaded while it was being loaded")


class BackgroundTasks:
    """Background tasks, which are given up together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start some work."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Give up all of it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ModelPreparation:
    """Prepares candidates for a set of models. Used on the event loop only.

    The groups of a token-level model start beside those of the loaded one. Where only its
    own are in the way, the loaded one is suspended, finishes what it has and gives up its
    groups first: it is then *vacated*.
    """

    def __init__(
        self,
        models: ModelSet,
        groups: TokenGroups,
        factory: ModelFactory,
        background: BackgroundTasks,
        remember: Callable[[], None],
    ) -> None:
        self._set = models
        self._groups = groups
        self._factory = factory
        self._background = background
        self._remember = remember
        self._adopted: dict[str, OpenedGroups] = {}
        self._under_way: dict[str, tuple[ReadModel, asyncio.Future[Candidate]]] = {}
        self._given_up: set[str] = set()
        """Of those under way what was made already, while others were still to come."""

        self._leaving: dict[str, tuple[ModelEngines, asyncio.Task[None]]] = {}
        """Groups that are about to end, each with the task that ends it."""

    def adopt(self, opened: Mapping[str, OpenedGroups]) -> None:
        """Have the first candidates of these models use groups that are started already."""
        self._adopted.update(opened)

    def cancel(self, names: Iterable[str]) -> None:
        """Give up preparing these."""
        for name in self._under_way.keys() & set(names):
            _, task = self._under_way[name]
            if not task.cancel():
                self._given_up.add(name)

    def steps(self, name: str) -> set[str]:
        """The models that one runs which is being prepared."""
        if name not in self._under_way:
            return set()
        read, _ = self._under_way[name]
        return set(read.source.steps)

    async def prepare(
        self, read: Sequence[ReadModel], *, all_or_none: bool = False
    ) -> tuple[list[Candidate], dict[str, BaseException]]:
        """Candidates of these models, and what kept others from being one, by name.

        Of a model that failed nothing is left; it may be vacated all the same. With
        ``all_or_none`` the first failure gives up the others, and comes before them.
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
            is_given_up = name in self._given_up
            self._given_up.discard(name)
            if isinstance(result, asyncio.CancelledError):
                failures[name] = GivenUpError(name)
            elif isinstance(result, BaseException):
                failures[name] = result
            elif is_given_up:
                failures[name] = GivenUpError(name)
                self._discard(result)
            else:
                candidates.append(result)
        if all_or_none:
            by_cause = sorted(failures.items(), key=lambda f: isinstance(f[1], GivenUpError))
            failures = dict(by_cause)
        return candidates, failures

    async def restored(self, read: ReadModel, opened: OpenedGroups | None) -> Candidate:
        """A candidate that may be down just now; ``opened`` if it has groups.

        Raises:
            RequestError, ConfigError: it cannot be made.
        """
        if opened is None:
            return await self._one(read)
        plain = self._factory.single(read.source, opened.engines)
        await self._groups.wait_known(opened)
        return _candidate(read, plain=plain, opened=opened)

    async def reopened(self, name: str) -> Candidate:
        """A vacated model over new groups.

        Raises:
            RequestError, ConfigError: it does not come up again.
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
        """Make loads that need these engines' devices wait for the task that ends them."""
        self._leaving.update(dict.fromkeys(engines.groups, (engines, task)))

    def ended(self, groups: Iterable[str]) -> None:
        """These engines are gone: no load waits for them, and no successor inherits them."""
        for group in groups:
            self._leaving.pop(group, None)
        self._remember()

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
                # If this fails, the server's start has failed, with which its groups end.
                return await self._served_by(read, adopted)
            return await self._over(read, await self._open(read))
        plain = None
        if read.source.role not in COMPOSED:
            plain = await asyncio.to_thread(self._factory.single, read.source)
            await start_model(plain)
        return _candidate(read, plain=plain)

    async def _over(self, read: ReadModel, opened: OpenedGroups) -> Candidate:
        """A token-level model over its groups, which end if it does not come up."""
        try:
            return await self._served_by(read, opened)
        except BaseException:
            self.end(opened.engines)
            raise

    def end(self, engines: ModelEngines) -> asyncio.Task[None]:
        """Let groups go that nobody here uses any more, once no other front end does; whoever
        needs their place waits for it."""
        task = self._background.spawn(self._end(engines))
        self.note_leaving(engines, task)
        return task

    def _discard(self, candidate: Candidate) -> None:
        """End what was made for nothing."""
        if candidate.engines is not None:
            self.end(candidate.engines)
        self._background.spawn(close_model(candidate.plain))

    async def _end(self, engines: ModelEngines) -> None:
        groups = tuple(engines.groups)
        await self._groups.close(engines, groups)
        self.ended(groups)

    async def _served_by(self, read: ReadModel, opened: OpenedGroups) -> Candidate:
        """A token-level model over its groups, once all of them are up."""
        plain = self._factory.single(read.source, opened.engines)
        await self._groups.wait_up(opened)
        return _candidate(read, plain=plain, opened=opened)

    async def _open(self, read: ReadModel) -> OpenedGroups:
        """Start the groups of a model: beside those that run, or else in their place."""
        name = read.source.name
        while True:
            # One that was in the way may have ended by the time that its refusal is read.
            known = self._leaving.copy()
            try:
                return await self._groups.open(read.source, self._remember)
            except GroupsRefusedError as error:
                known.update(self._leaving)
                leaving = {known[group][1] for group in error.conflicts if group in known}
                if leaving:
                    logger.info("model '%s' waits for the place of groups that end", name)
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
        """End the groups of a loaded model, which admits nothing from now on."""
        logger.info("model '%s' ends its groups first: the new ones need their place", name)
        suspended = self._set.suspend(name)
        await all_idle(suspended)
        engines = suspended[-1].candidate.engines
        assert engines is not None
        self._set.detach_engines(name)
        ending = self.end(engines)
        # The model without them: a front end after this one does not wait for them.
        self._remember()
        # They end even if the load is given up meanwhile.
        await asyncio.shield(ending)


async def all_idle(models: Iterable[LoadedModel]) -> None:
    """Return when no request runs on these, of which users come before steps."""
    for loaded in models:
        await loaded.model.wait_idle()


def is_expected(failure: BaseException) -> bool:
    """Whether an operator or a client can mend a failure, which is then no bug of ours."""
    return isinstance(failure, (RequestError, ConfigError))


def log_lost(name: str, failure: BaseException) -> None:
    """Say that a model which served does so no more."""
    trace = None if is_expected(failure) else failure
    logger.error("Model '%s' is not served any more: %s", name, failure, exc_info=trace)


def load_error(name: str, failure: BaseException) -> LoadError:
    """A failure as the client of the load is told of it."""
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
