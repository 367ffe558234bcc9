"""The served models by name and version, their states, and whether they are ready."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.inference.request import Model
from trimaran.server.inference.validation import Validator

UNLOADED = "unloaded"
"""The reason shown for a model that was unloaded on purpose."""

_DISCONNECTED = "its workers are not connected"


class VersionState(Enum):
    """The state of one version of a model, by the name that clients see."""

    LOADING = "LOADING"
    """Not admitted yet, or temporarily not; running requests go on."""
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One line of the repository index; a model that was never loaded has only a name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StateOfVersion:
    """The state of a version that takes no requests, and the reason."""

    name: str
    version: str
    state: VersionState
    reason: str = ""

    def to_wire(self) -> dict[str, str]:
        """Plain values, for msgpack."""
        return {**asdict(self), "state": self.state.value}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> StateOfVersion:
        """The inverse of `to_wire`."""
        return cls(**{**wire, "state": VersionState(wire["state"])})


class NotReadyError(RequestError):
    """The model exists but cannot run now; the client may retry."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(
            f"Request for unknown model: '{name}' version {version} is not at ready state",
            ErrorKind.UNAVAILABLE,
        )


@dataclass(slots=True)
class _Version:
    """One version's state; ``model`` is set while requests may ask about the model."""

    state: VersionState
    reason: str = ""
    model: Model | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request could run now."""
        model = self.model
        return self.state is VersionState.READY and model is not None and model.is_ready


@dataclass(slots=True)
class _Extras:
    """The objects that live as long as a served model is referenced."""

    validator: Validator
    labels: Mapping[str, list[str]]


class ModelRegistry:
    """All models of one front end. An empty version text means the highest version.

    A version is replaced between two steps of the event loop. A caller that got a model keeps
    the model's objects until its request ends.
    """

    def __init__(self, models: Iterable[Model] = (), *, strict_readiness: bool = True) -> None:
        self._versions: dict[str, dict[int, _Version]] = {}
        self._extras: WeakKeyDictionary[Model, _Extras] = WeakKeyDictionary()
        self._strict_readiness = strict_readiness
        self.on_change: Callable[[], None] = _ignore
        """Called when a version starts or stops serving."""

        self.made_of_models: dict[object, Any] = {}
        """What callers made of `models`. Emptied at each change, so that nothing keeps an
        unloaded model."""

        by_name: dict[str, list[Model]] = {}
        for model in models:
            by_name.setdefault(model.name, []).append(model)
        for versions in by_name.values():
            self.publish(versions)

    # ---- changes ------------------------------------------------------------------------

    def publish(
        self, models: Collection[Model], labels: Mapping[str, list[str]] | None = None
    ) -> None:
        """Serve exactly these versions of one model from now on.

        ``labels`` are the class labels of outputs.
        """
        name = next(iter(models)).name
        versions = self._versions.setdefault(name, {})
        for version in versions.values():
            version.model = None
            version.state, version.reason = VersionState.UNAVAILABLE, UNLOADED
        for model in models:
            self._extras[model] = _Extras(Validator(model.config), labels or {})
            versions[int(model.version)] = _Version(VersionState.READY, model=model)
        self._changed()

    def set_state(self, name: str, version: str, state: VersionState, reason: str = "") -> None:
        """Change one version's state; its model stays if the version may serve again."""
        versions = self._versions.setdefault(name, {})
        known = versions.setdefault(int(version), _Version(state))
        known.state, known.reason = state, reason
        if state in (VersionState.UNLOADING, VersionState.UNAVAILABLE):
            known.model = None
        self._changed()

    def set_loading(self, name: str, reason: str) -> None:
        """Mark a model as not serving yet: its known versions, or else the first."""
        for number in self._versions.get(name) or (1,):
            self.set_state(name, str(number), VersionState.LOADING, reason)

    def set_unloaded(self, name: str) -> None:
        """Mark a model as unloaded, including a model whose load failed."""
        for version in self._versions.get(name, {}).values():
            if version.state is VersionState.UNAVAILABLE:
                version.reason = UNLOADED
        self._changed()

    def forget(self, name: str, version: str) -> None:
        """Remove a version from the registry, as if it had never been loaded."""
        versions = self._versions[name]
        del versions[int(version)]
        if not versions:
            del self._versions[name]
        self._changed()

    def _changed(self) -> None:
        self.made_of_models.clear()
        self.on_change()

    # ---- questions ----------------------------------------------------------------------

    def get(self, name: str, version: str = "") -> Model:
        """The model, ready or not.

        Raises:
            RequestError: no such model or version, or ``version`` is not a number.
            NotReadyError: it is being loaded for the first time, or a version is named that
                is unloaded.
        """
        number, found = self._find(name, version)
        if found.model is not None:
            return found.model
        if version or found.state is not VersionState.UNAVAILABLE:
            raise NotReadyError(name, str(number))
        raise _unknown(f"'{name}' has no available versions")

    def get_ready(self, name: str, version: str = "") -> Model:
        """The model, able to run.

        Raises:
            RequestError: as for `get`.
            NotReadyError: known but not able to run now.
        """
        _, found = self._find(name, version)
        if found.model is not None and found.is_ready:
            return found.model
        model = self.get(name, version)
        raise NotReadyError(model.name, model.version)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether a request to this model could run now.

        Raises:
            RequestError: no such model or version.
        """
        try:
            self.get(name, version)
        except NotReadyError:
            return False
        return self._find(name, version)[1].is_ready

    def validator(self, model: Model) -> Validator:
        """The checks of this model's requests."""
        return self._extras[model].validator

    def labels(self, model: Model) -> Mapping[str, list[str]]:
        """The class labels of the model's outputs, for outputs that have labels."""
        return self._extras[model].labels

    def models(self) -> list[Model]:
        """All models that may serve, by name and version."""
        found = (
            versions[number].model
            for _, versions in sorted(self._versions.items())
            for number in sorted(versions)
        )
        return [model for model in found if model is not None]

    def ready_versions(self, name: str) -> list[str]:
        """The versions of a model that could run now."""
        versions = self._versions[name]
        return [str(number) for number in sorted(versions) if versions[number].is_ready]

    def state(self, name: str, version: str) -> VersionState | None:
        """The state of a version; None if the version is unknown."""
        found = self._versions.get(name, {}).get(int(version))
        return None if found is None else found.state

    def not_ready(self) -> list[StateOfVersion]:
        """The versions that take no requests; a version whose workers are away is not
        included.
        """
        return [
            StateOfVersion(name, str(number), version.state, version.reason)
            for name, versions in self._versions.items()
            for number, version in versions.items()
            if version.state is not VersionState.READY
        ]

    @property
    def is_ready(self) -> bool:
        """Whether the whole server counts as ready."""
        return not self._strict_readiness or all(
            version.is_ready or version.reason == UNLOADED
            for versions in self._versions.values()
            for version in versions.values()
        )

    def index(
        self, *, only_ready: bool = False, others: Iterable[str] = ()
    ) -> list[IndexEntry]:
        """All versions of all models, by name; ``others`` are models that may be loaded."""
        entries = [
            _entry(name, number, versions[number])
            for name, versions in self._versions.items()
            for number in sorted(versions)
        ]
        entries += [IndexEntry(name) for name in set(others) - set(self._versions)]
        entries.sort(key=lambda entry: entry.name)
        ready = VersionState.READY.value
        return [entry for entry in entries if entry.state == ready or not only_ready]

    def _find(self, name: str, version: str) -> tuple[int, _Version]:
        """A version's number and state; without a version, those of the highest one that may
        serve.
        """
        number = parse_version(version)
        versions = self._versions.get(name)
        if versions is None:
            raise _unknown(f"'{name}' is not found")
        if number is None:
            number = max(versions, key=lambda n: (_may_serve(versions[n]), n))
        if number not in versions:
            raise _unknown(f"'{name}' version {number} is not found")
        return number, versions[number]


def _may_serve(version: _Version) -> int:
    """The order of preference of versions when a request names none."""
    if version.model is not None:
        return 2
    return int(version.state is not VersionState.UNAVAILABLE)


def _entry(name: str, number: int, version: _Version) -> IndexEntry:
    state, reason = version.state, version.reason
    if state is VersionState.READY and not version.is_ready:
        state, reason = VersionState.UNAVAILABLE, _DISCONNECTED
    return IndexEntry(name, str(number), state.value, reason)


def parse_version(text: str) -> int | None:
    """A version number; None for an empty text or -1, which mean the latest.

    Raises:
        RequestError: not a number, or not above 0.
    """
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        raise _no_version(text) from None
    if abs(number) >= 1 << 63:
        raise _no_version(text)
    if number < 0:
        raise RequestError(
            f"invalid model version specified '{text}' , version should be an integral value "
            "> 0"
        )
    return number


def _no_version(text: str) -> RequestError:
    return RequestError(
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


def _ignore() -> None:
    """The default listener does nothing."""


def _unknown(what: str) -> RequestError:
    return RequestError(f"Request for unknown model: {what}", ErrorKind.NOT_FOUND)
