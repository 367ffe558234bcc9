"""The loaded models, their composition, their replacement, and names that are being loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from trimaran.comm.errors import ConfigError
from trimaran.server.engines.model_engines import ModelEngines
from trimaran.server.inference.registry import ModelRegistry, VersionState
from trimaran.server.inference.request import Model
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.metrics import Metrics
from trimaran.server.models.factory import COMPOSED, ModelFactory, Step
from trimaran.server.python_models.model import PythonModel
from trimaran.server.repository.model_repository import RepositoryModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that is ready to be committed."""

    source: RepositoryModel
    labels: Mapping[str, list[str]] = field(default_factory=dict)
    fingerprint: str = ""
    """Fingerprint of the files; empty if the files came with a request."""

    load_id: str = ""
    """The load that made the candidate: a successor from the same load keeps its counts."""

    plain: Model | None = None
    """None for a model that is composed of others."""

    engines: ModelEngines | None = None
    groups: tuple[str, ...] = ()
    generation: int = 1

    @property
    def name(self) -> str:
        """The model's name."""
        return self.source.name

    @property
    def version(self) -> str:
        """The latest version that is served."""
        return str(self.source.versions[-1])

    @property
    def versions(self) -> list[str]:
        """All versions that are served."""
        return list(map(str, self.source.versions))


@dataclass(frozen=True, slots=True)
class LoadedModel(Step):
    """A model that serves, or a replaced model with requests to finish."""

    candidate: Candidate
    model: MeasuredModel

    async def wait_idle(self) -> None:
        """Return when no request is running on any version."""
        for model in (self.model, *self.older):
            await model.wait_idle()


@dataclass(slots=True)
class Outcome:
    """The outcome of a commit."""

    replaced: list[LoadedModel] = field(default_factory=list)
    """Models that only their running requests reference; users come before their steps."""

    failures: dict[str, Exception] = field(default_factory=dict)
    """Candidates that do not fit the loaded models, and why."""


class ModelSet:
    """All loaded models by name. Used on the event loop only.

    Each method makes its whole change between two steps of the event loop, registry included. A
    composed model always runs the loaded models with its steps' names. A composed model is
    rebuilt when a step is replaced, waits while a step is unloaded, and is restored when the
    step is loaded again.
    """

    def __init__(
        self, factory: ModelFactory, metrics: Metrics, registry: ModelRegistry
    ) -> None:
        self._factory = factory
        self._metrics = metrics
        self._registry = registry
        self._loaded: dict[str, LoadedModel] = {}
        self._waiting: dict[str, Candidate] = {}

    def get(self, name: str) -> LoadedModel | None:
        """The loaded model of a name, if there is one."""
        return self._loaded.get(name)

    def loaded(self) -> list[LoadedModel]:
        """All loaded models."""
        return list(self._loaded.values())

    def waiting(self) -> list[Candidate]:
        """Composed models that are restored as soon as all of their steps are loaded."""
        return list(self._waiting.values())

    def steps(self, name: str) -> set[str]:
        """The steps of a loaded or waiting model."""
        return self._graph({}).get(name, set())

    def is_kept(self, candidate: Candidate) -> bool:
        """Whether a model is loaded, or waits, with the same folder as ``candidate``."""
        kept = [loaded.candidate for loaded in self.loaded()] + self.waiting()
        return any(each.source.folder == candidate.source.folder for each in kept)

    def dependents(self, names: Iterable[str]) -> list[LoadedModel]:
        """The loaded models that run these, directly or indirectly; users before steps."""
        found = _users(self._graph({}), set(names))
        return [self._loaded[name] for name in reversed(found) if name in self._loaded]

    def commit(self, candidates: Sequence[Candidate], counted: Collection[str] = ()) -> Outcome:
        """Serve these models, and replace the models with the same names.

        Models in ``counted`` stayed loaded at other front ends and keep their counts.
        """
        outcome = Outcome()
        changed = set()
        requested = {}
        for candidate in candidates:
            if candidate.source.role in COMPOSED:
                requested[candidate.name] = candidate
            else:
                assert candidate.plain is not None
                self._install(candidate, candidate.plain, outcome, counted)
                changed.add(candidate.name)
        graph = self._graph(requested)
        for name in _users(graph, changed | requested.keys(), also=requested.keys()):
            if name in requested and name in _users(graph, {name}):
                outcome.failures[name] = _circle(requested.pop(name))
            self._compose(name, requested.get(name), outcome, counted)
        outcome.replaced.reverse()
        return outcome

    def withdraw(self, names: Iterable[str], *, explicitly: Iterable[str]) -> list[LoadedModel]:
        """Stop serving these and all models that run them; users before steps.

        Models in ``explicitly`` are not restored with their steps.
        """
        chosen = set(names)
        going = [*self.dependents(chosen), *self._bottom(chosen)]
        for loaded in going:
            name = loaded.candidate.name
            del self._loaded[name]
            if name not in chosen:
                self._waiting[name] = loaded.candidate
            for version in loaded.candidate.versions:
                self._registry.set_state(name, version, VersionState.UNLOADING)
        for name in explicitly:
            self._waiting.pop(name, None)
        return going

    def await_steps(self, candidates: Iterable[Candidate]) -> None:
        """Restore these composed models as soon as all of their steps are loaded."""
        self._waiting.update({candidate.name: candidate for candidate in candidates})

    def awaiting(self, names: Iterable[str]) -> list[Candidate]:
        """The composed models that can be restored once these are loaded."""
        chosen, found = set(names), []
        there = self._loaded.keys() | chosen
        for name in _users(self._graph({}), chosen):
            candidate = self._waiting.get(name)
            if candidate is not None and set(candidate.source.steps) <= there:
                there.add(name)
                found.append(candidate)
        return found

    def suspend(self, name: str) -> list[LoadedModel]:
        """Stop admitting requests to a model and to the models that run it, until the models
        are committed again; users before steps.
        """
        going = [*self.dependents([name]), *self._bottom({name})]
        for loaded in going:
            for version in loaded.candidate.versions:
                self._registry.set_state(loaded.candidate.name, version, VersionState.LOADING)
        return going

    def detach_engines(self, name: str) -> None:
        """Record that a suspended model's engines have ended."""
        loaded = self._loaded[name]
        candidate = replace(loaded.candidate, engines=None, groups=())
        self._loaded[name] = replace(loaded, candidate=candidate)

    # ---- composition --------------------------------------------------------------------

    def _bottom(self, names: set[str]) -> list[LoadedModel]:
        """The loaded models among these names without a dependent among these names."""
        above = {loaded.candidate.name for loaded in self.dependents(names)}
        return [self._loaded[name] for name in names if name in self._loaded.keys() - above]

    def _graph(self, requested: Mapping[str, Candidate]) -> dict[str, set[str]]:
        """The steps of every composed model, loaded or requested."""
        known = {name: loaded.candidate for name, loaded in self._loaded.items()}
        known.update(self._waiting)
        known.update(requested)
        return {name: set(candidate.source.steps) for name, candidate in known.items()}

    def _compose(
        self,
        name: str,
        requested: Candidate | None,
        outcome: Outcome,
        counted: Collection[str],
    ) -> None:
        """Build a composed model from the models that are loaded now."""
        if requested is not None:
            try:
                plain = self._factory.composed(requested.source, self._loaded)
            # A failure of one model must not stop the change of other models.
            except Exception as error:
                outcome.failures[name] = error
            else:
                self._install(requested, plain, outcome, counted)
                return
        loaded = self._loaded.get(name)
        before = loaded.candidate if loaded is not None else self._waiting.get(name)
        # A model of another role has no steps: a failed successor leaves it unchanged.
        if before is None or before.source.role not in COMPOSED:
            return
        try:
            plain = self._factory.composed(before.source, self._loaded)
        except Exception as error:
            self._take_down(before, outcome, error)
        else:
            self._install(before, plain, outcome, counted)

    def _take_down(self, candidate: Candidate, outcome: Outcome, error: Exception) -> None:
        loaded = self._loaded.pop(candidate.name, None)
        self._waiting[candidate.name] = candidate
        if loaded is not None:
            outcome.replaced.append(loaded)
            trace = None if isinstance(error, ConfigError) else error
            logger.error("Model '%s' is not served: %s", candidate.name, error, exc_info=trace)
            state = VersionState.UNAVAILABLE
            self._registry.set_state(candidate.name, candidate.version, state, str(error))

    def _install(
        self, candidate: Candidate, plain: Model, outcome: Outcome, counted: Collection[str]
    ) -> None:
        old = self._loaded.get(candidate.name)
        if old is not None and old.candidate.load_id == candidate.load_id:
            model = old.model.counting_on(plain)
        elif candidate.name in counted:
            model = self._metrics.measure(plain)
        else:
            # Counts are also cleared without an old model: requests of an unloaded model may
            # still run.
            served = set(candidate.versions)
            for version in served.union(old.candidate.versions if old is not None else ()):
                self._metrics.forget(candidate.name, version)
            model = self._metrics.measure(plain)
        older = plain.older if isinstance(plain, PythonModel) else ()
        measured = tuple(map(self._metrics.measure, older))
        self._loaded[candidate.name] = LoadedModel(
            candidate.source, plain, model, candidate, older=measured
        )
        self._waiting.pop(candidate.name, None)
        self._registry.publish([*measured, model], candidate.labels)
        if old is not None:
            outcome.replaced.append(old)


def _users(
    steps: Mapping[str, set[str]], names: Set[str], also: Set[str] = frozenset()
) -> list[str]:
    """The models that run any of ``names``, directly or indirectly, and the models of ``also``:
    steps before users.
    """
    found, reached = set(also), set(names)
    while more := {name for name, run in steps.items() if run & reached} - found:
        found |= more
        reached |= more
    ordered: list[str] = []
    while found:
        # Members of a cycle may have any order: no member of a cycle can be built.
        ready = sorted(n for n in found if not steps[n] & found) or sorted(found)[:1]
        ordered += ready
        found -= set(ready)
    return ordered


def _circle(candidate: Candidate) -> ConfigError:
    return ConfigError(
        f"{candidate.source.config_path}: the ensemble '{candidate.name}' is a step of itself"
    )


class ExclusiveNames:
    """Locks by name, all taken together, so that two tasks never deadlock."""

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._released = asyncio.Event()

    def are_free(self, names: Iterable[str]) -> bool:
        """Whether none of these names is locked."""
        return self._held.isdisjoint(names)

    @asynccontextmanager
    async def hold(self, names: Iterable[str]) -> AsyncIterator[None]:
        """Wait until none of these names is locked, then lock all of them."""
        wanted = set(names)
        while not self.are_free(wanted):
            self._released.clear()
            await self._released.wait()
        self._held |= wanted
        try:
            yield
        finally:
            self._held -= wanted
            self._released.set()
